"""Faults of ALiBi's slopes and of BLOOM's rows: refused, with layer and module named.

A bias by the key's position alone, or by a distance that is off by one, is no fault: it differs by
the same number for all keys of a query, which softmax does not see.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from modelmill.models import bloom
from modelmill.nn.alibi import AlibiConfig
from modelmill.nn.attention import AttentionCore
from modelmill.nn.norm import NormWithoutResidual
from tests.models import planted_fault as planted
from tests.models.family_cases import EvenSlopes, ReversedSlopes, changed

FAMILY = "bloom"
CORE = ("attn.core",)
QKV = "attn.q_proj", "attn.k_proj", "attn.v_proj"


def alibi(config: AlibiConfig | None) -> planted.PlantedFault:
    """Other slopes, in every layer."""
    return planted.config_fault(bloom, changed(alibi=config), CORE)


class ChangedSlopes(AlibiConfig):
    """Slopes that follow from the right ones."""

    def __init__(self, change: Callable[[list[float]], list[float]]) -> None:
        super().__init__()
        object.__setattr__(self, "change", change)

    def slopes(self, heads: int) -> list[float]:
        """The slope of each head."""
        return self.change(super().slopes(heads))  # type: ignore[attr-defined]


def slopes(change: Callable[[list[float]], list[float]]) -> planted.PlantedFault:
    """Slopes that follow from the right ones."""
    return alibi(ChangedSlopes(change))


def those_of(heads: int) -> Callable[[list[float]], list[float]]:
    """The first slopes of another number of heads."""
    return lambda right: AlibiConfig().slopes(heads)[: len(right)]


def only_in_the_first_layer(self: Any, q: torch.Tensor, step: Any) -> torch.Tensor:
    if self.cache_index:
        self.slopes, self._modifies_scores = None, False
    return real_core(self, q, step)


def pass_through(self: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
    del self, step
    return x


def not_ungrouped(rule: Any) -> Any:
    steps = [step for step in rule.how.split("+") if not step.startswith("ungroup_qkv")]
    return replace(rule, how="+".join(steps))


real_core = AttentionCore.forward
FAULTS: dict[str, planted.PlantedFault] = {
    "no ALiBi": alibi(None),
    "no ALiBi behind the first layer": planted.module_fault(
        AttentionCore, only_in_the_first_layer, CORE, 1
    ),
    "slopes in the other order": alibi(ReversedSlopes()),
    "slopes of the next power of two": alibi(EvenSlopes()),
    "slopes of twice as many heads": slopes(those_of(12)),
    "slopes of 8 heads": slopes(those_of(8)),
    "slopes' sign": alibi(AlibiConfig(scale=-1.0)),
    "slopes x 1.5": alibi(AlibiConfig(scale=1.5)),
    "slopes scaled like scores": alibi(AlibiConfig(scale=8**-0.5)),
    "another largest exponent": alibi(AlibiConfig(bias_max=16.0)),
    "exponents from 0": slopes(lambda right: [1.0, *right[:-1]]),
    "exponents of e": slopes(lambda right: [math.exp(math.log2(each)) for each in right]),
    "slopes of neighbouring heads": slopes(lambda right: [*right[1:], right[0]]),
    "finer slopes first": slopes(lambda right: [*right[4:], *right[:4]]),
    "slopes sorted": slopes(lambda right: sorted(right, reverse=True)),
    "slopes of the power of two repeated": slopes(lambda right: [*right[:4], *right[:2]]),
    "heads beyond the power of two without": slopes(lambda right: [*right[:4], 0.0, 0.0]),
    "one slope for all heads": slopes(lambda right: [right[1]] * len(right)),
    "rows of q, k and v as stored": planted.rule_fault(bloom, not_ungrouped, QKV),
    "norm behind the embedding forgotten": planted.module_fault(
        NormWithoutResidual, pass_through, "embed", None
    ),
    "a bias of q, k and v forgotten": planted.tensor_fault(
        "layers.1.attn.qkv_proj.bias", torch.zeros_like, QKV, 1
    ),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = planted.refusal_test(FAULTS)
