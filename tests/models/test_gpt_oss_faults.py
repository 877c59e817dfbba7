"""Faults of sinks, windows, YaRN and clamped experts: refused, with layer and module named.

Those of the router's config and of MXFP4 are in ``families/gpt_oss.py`` and ``test_gpt_oss.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from modelmill.models import gpt_oss
from modelmill.nn.attention import AttentionCore
from modelmill.nn.mlp import ClampedSwiglu
from tests.models import planted_fault as planted
from tests.models.family_cases import ROTARY, changed, with_scaling

FAMILY = "gpt_oss"
CHANGES = {"num_hidden_layers": 2, "num_local_experts": 4}
LAYER = "layers.1"
CORE, ACT = ("attn.core",), ("mlp.experts.0.act",)


def sinks(change: Callable[[torch.Tensor], torch.Tensor]) -> planted.PlantedFault:
    """Other sinks than the checkpoint's, in every layer."""
    real = AttentionCore._score_mods

    def score_mods(self: Any, *args: Any) -> Any:
        mods = real(self, *args)
        return mods._replace(sinks=change(mods.sinks))

    return lambda: mock.patch.object(AttentionCore, "_score_mods", score_mods), CORE, 0


def config(modules: tuple[str, ...], layer: int = 0, **changes: Any) -> planted.PlantedFault:
    """Another config than the checkpoint's."""
    return planted.config_fault(gpt_oss, changed(**changes), modules, layer)


def tensor(
    name: str, modules: tuple[str, ...], change: Callable[[torch.Tensor], torch.Tensor]
) -> planted.PlantedFault:
    """Another tensor than the checkpoint's, in one layer."""
    return planted.tensor_fault(f"{LAYER}.{name}", change, modules, 1)


def gate(
    compute: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor],
) -> planted.PlantedFault:
    """Another gate of the experts; it gets gate, up and the bounds."""

    def forward(self: Any, gate_up: torch.Tensor, step: Any) -> torch.Tensor:
        del step
        return compute(*gate_up.chunk(2, -1), self.clamp)

    return planted.module_fault(ClampedSwiglu, forward, ACT)


def gated(low: torch.Tensor, up: torch.Tensor, alpha: float) -> torch.Tensor:
    return (up + 1) * low * (low * alpha).sigmoid()


def without_one(low: torch.Tensor, up: torch.Tensor, clamp: Any) -> torch.Tensor:
    low, up = low.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return up * low * (low * clamp.alpha).sigmoid()


def bounded_below(low: torch.Tensor, up: torch.Tensor, clamp: Any) -> torch.Tensor:
    bounds = -clamp.limit, clamp.limit
    return gated(low.clamp(*bounds), up.clamp(*bounds), clamp.alpha)


def up_bounded_above_only(low: torch.Tensor, up: torch.Tensor, clamp: Any) -> torch.Tensor:
    return gated(low.clamp(max=clamp.limit), up.clamp(max=clamp.limit), clamp.alpha)


def gate_and_up_exchanged(low: torch.Tensor, up: torch.Tensor, clamp: Any) -> torch.Tensor:
    return gated(up.clamp(max=clamp.limit), low.clamp(-clamp.limit, clamp.limit), clamp.alpha)


def experts_swapped(rule: Any) -> Any:
    swap = {".experts.0.": ".experts.1.", ".experts.1.": ".experts.0."}
    old = next((name for name in swap if name in rule.target), None)
    return rule if old is None else replace(rule, target=rule.target.replace(old, swap[old]))


GATE_UP = "mlp.experts.3.gate_proj", "mlp.experts.3.up_proj"
FAULTS: dict[str, planted.PlantedFault] = {
    "sinks forgotten": sinks(lambda t: torch.full_like(t, float("-inf"))),
    "sinks of other heads": sinks(lambda t: t.roll(1)),
    "sinks of another KV head": sinks(lambda t: t.roll(2)),
    "sinks' sign": sinks(torch.neg),
    "a larger sink": sinks(lambda t: t + torch.tensor([0.0, 1.0, 0.0, 0.0])),
    "sinks of 0": tensor("attn.core.sinks", CORE, torch.zeros_like),
    "window + 1": config(CORE, windows=(21, None)),
    "window - 1": config(CORE, windows=(19, None)),
    "windows one layer later": config(CORE, windows=(None, 20)),
    "a window in every layer": config(CORE, 1, windows=(20, 20)),
    "YaRN's factor": config(ROTARY, rope=with_scaling(factor=5.0)),
    "YaRN's fast channels": config(ROTARY, rope=with_scaling(beta_fast=8.0)),
    "YaRN's trained length": config(ROTARY, rope=with_scaling(original_max_position_embeddings=32)),
    "YaRN's factor of the scores forgotten": config(
        ROTARY, rope=with_scaling(attention_factor=1.0)
    ),
    "YaRN's ramp truncated": config(ROTARY, rope=with_scaling(truncate=True)),
    "router's bias forgotten": tensor("mlp.router.bias", ("mlp.router",), torch.zeros_like),
    "router's bias of other experts": tensor(
        "mlp.router.bias", ("mlp.router",), lambda t: t.roll(1)
    ),
    "experts swapped": planted.rule_fault(
        gpt_oss, experts_swapped, ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj")
    ),
    "gate and up not taken in turns": tensor(
        "mlp.experts.3.gate_up_proj.weight",
        GATE_UP,
        lambda t: t.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1),
    ),
    "an expert's first bias forgotten": tensor(
        "mlp.experts.3.gate_up_proj.bias", GATE_UP, torch.zeros_like
    ),
    "an expert's second bias forgotten": tensor(
        "mlp.experts.3.down_proj.bias", ("mlp.experts.3.down_proj",), torch.zeros_like
    ),
    "up without its 1": gate(without_one),
    "gate bounded from below": gate(bounded_below),
    "up bounded from above only": gate(up_bounded_above_only),
    "gate and up exchanged": gate(gate_and_up_exchanged),
    "alpha forgotten": gate(
        lambda low, up, clamp: gated(
            low.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit), 1.0
        )
    ),
}


test_a_planted_fault_is_refused_by_name = planted.refusal_test(FAULTS)
