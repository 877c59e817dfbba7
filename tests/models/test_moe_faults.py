"""Faults of experts that no config makes: acceptance refuses the build and names the module."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from modelmill.checkpoint.rename import Rule
from modelmill.models import qwen2_moe
from modelmill.nn.moe import CombineExperts, GatherExpertTokens, SharedExpertGate
from tests.models.planted_fault import (
    PlantedFault,
    changed_rules,
    module_fault,
    refusal_test,
    tensor_fault,
)


def swapped_experts() -> AbstractContextManager[None]:
    """The matrices of experts 0 and 1 in each other's places."""
    other = {"0": "1", "1": "0"}

    def swapped(rule: Rule) -> Rule:
        target = re.sub(r"\.experts\.([01])\.", lambda m: f".experts.{other[m[1]]}.", rule.target)
        return replace(rule, target=target)

    return changed_rules(qwen2_moe, swapped)


def without_shared(self: CombineExperts, routing: torch.Tensor, *args: Any) -> torch.Tensor:
    first, end = self.experts
    return real_combine(self, routing, *args[: end - first], args[-1])


def without_weights(self: CombineExperts, routing: torch.Tensor, *args: Any) -> torch.Tensor:
    return real_combine(self, (routing > 0).float(), *args)


def reversed_tokens(
    self: GatherExpertTokens, x: torch.Tensor, routing: torch.Tensor, step: Any
) -> Any:
    return real_tokens(self, x, routing, step).flip(0)


def without_sigmoid(
    self: SharedExpertGate, x: torch.Tensor, out: torch.Tensor, step: Any
) -> torch.Tensor:
    del step
    return out * (x.float() @ self.weight.float().T).to(out.dtype)


real_combine, real_tokens = CombineExperts.forward, GatherExpertTokens.forward
FAMILY = "qwen2_moe"
LAYER = "layers.1.mlp"
FAULTS: dict[str, PlantedFault] = {
    "experts swapped": (
        swapped_experts,
        ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"),
        0,
    ),
    "one expert's scale x 1.05": tensor_fault(
        f"{LAYER}.experts.3.down_proj.weight", lambda t: t * 1.05, "mlp.experts.3.down_proj", 1
    ),
    "gate and up exchanged in one expert": tensor_fault(
        f"{LAYER}.experts.4.gate_up_proj.weight",
        lambda t: torch.cat(t.chunk(2)[::-1]),
        "mlp.experts.4.gate_proj",
        1,
    ),
    "router's rows in another order": tensor_fault(
        f"{LAYER}.router.weight", lambda t: t.roll(1, 0), "mlp.router", 1
    ),
    "shared expert forgotten": module_fault(CombineExperts, without_shared, "mlp.combine"),
    "weights forgotten": module_fault(CombineExperts, without_weights, "mlp.combine"),
    "tokens of an expert reversed": module_fault(
        GatherExpertTokens, reversed_tokens, "mlp.experts.0.tokens"
    ),
    "shared gate without its sigmoid": module_fault(
        SharedExpertGate, without_sigmoid, "mlp.shared_gate"
    ),
    "shared gate x -1": tensor_fault(
        f"{LAYER}.shared_gate.weight", torch.neg, "mlp.shared_gate", 1
    ),
}


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)
