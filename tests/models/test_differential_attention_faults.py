"""Faults of differential attention: refused, with layer and module named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from modelmill.models import diffllama
from modelmill.nn.attention import AttentionCore
from modelmill.nn.differential_attention import HeadPairDifference, RepeatHeadPairs
from tests.models.family_cases import changed
from tests.models.planted_fault import (
    PlantedFault,
    config_fault,
    module_fault,
    refusal_test,
    rule_fault,
    tensor_fault,
)

FAMILY = "diffllama"
PAIRS = tuple(f"attn.pairs.{name}_pairs" for name in "qkv")
DIFFERENCE, CORE = "attn.difference", "attn.core"
PROJECTIONS = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
repeat, subtract, attend = (
    RepeatHeadPairs.forward,
    HeadPairDifference.forward,
    AttentionCore.forward,
)


def difference(
    change: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor], *, scaled: bool = True
) -> PlantedFault:
    """Another difference of both maps' outputs, then the norm if it is scaled."""

    def forward(self: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
        del step
        maps = x.view(len(x), self.kv_pairs, 2, 2, -1, self.spec.head_dim).float()
        out = change(self, *maps.permute(2, 0, 1, 4, 3, 5).flatten(-2))
        if scaled:
            size = torch.rsqrt(out.square().mean(-1, keepdim=True) + self.spec.eps)
            out = out * size * (1 - self.spec.lambda_init)
        return out.flatten(1).to(x.dtype)

    return module_fault(HeadPairDifference, forward, DIFFERENCE)


def copies(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> PlantedFault:
    """Heads of the pages in another order."""

    def forward(self: Any, qkv: torch.Tensor, step: Any) -> torch.Tensor:
        return change(self, repeat(self, qkv, step))

    return module_fault(RepeatHeadPairs, forward, PAIRS)


def values_exchanged(self: Any, out: torch.Tensor) -> torch.Tensor:
    width = self.kv_pairs * 4 * self.spec.head_dim
    v = out[:, -width:].unflatten(1, (-1, 2, self.spec.head_dim)).flip(2)
    return torch.cat((out[:, :-width], v.flatten(1)), 1)


def keys_exchanged(self: Any, out: torch.Tensor) -> torch.Tensor:
    width = self.kv_pairs * 4 * self.spec.head_dim
    k = out[:, -2 * width : -width].unflatten(1, (-1, 2, 2 * self.spec.head_dim)).flip(2)
    return torch.cat((out[:, : -2 * width], k.flatten(1), out[:, -width:]), 1)


def start_of(change: Callable[[Any], float]) -> PlantedFault:
    """Another λ₀."""

    def forward(self: Any, x: torch.Tensor, step: Any) -> torch.Tensor:
        spec = self.spec
        self.spec = replace(spec, lambda_init=change(spec))
        try:
            return subtract(self, x, step)
        finally:
            self.spec = spec

    return module_fault(HeadPairDifference, forward, DIFFERENCE)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> PlantedFault:
    return tensor_fault(f"layers.1.{DIFFERENCE}.{name}", change, DIFFERENCE, 1)


def without_pairs(rule: Any) -> Any:
    """Heads in the checkpoint's order."""
    return replace(rule, how=rule.how.partition("+rows")[0])


def fixed(self: Any, out: torch.Tensor) -> torch.Tensor:
    size = torch.rsqrt(out.square().mean(-1, keepdim=True) + self.spec.eps)
    return out * size


FAULTS: dict[str, PlantedFault] = {
    "a sum": difference(lambda self, one, two: one + self.compute_lambda() * two),
    "first maps alone": difference(lambda self, one, two: one),
    "maps exchanged": difference(lambda self, one, two: two - self.compute_lambda() * one),
    "lambda of 1": difference(lambda self, one, two: one - two),
    "lambda without its start": difference(
        lambda self, one, two: one - (self.compute_lambda() - self.spec.lambda_init) * two
    ),
    "no norm": difference(
        lambda self, one, two: (one - self.compute_lambda() * two) * (1 - self.spec.lambda_init),
        scaled=False,
    ),
    "norm without 1 - lambda": difference(
        lambda self, one, two: fixed(self, one - self.compute_lambda() * two), scaled=False
    ),
    "start of the next layer": start_of(lambda spec: 0.8 - 0.75 * (0.8 - spec.lambda_init)),
    "start of 0.8": start_of(lambda spec: 0.8),
    "values exchanged": copies(values_exchanged),
    "keys exchanged": copies(keys_exchanged),
    "q1 x 1.5": tensor("lambda_q1", lambda t: 1.5 * t),
    "k2 of other channels": tensor("lambda_k2", lambda t: t.roll(1)),
    "heads in the checkpoint's order": rule_fault(diffllama, without_pairs, PROJECTIONS),
    "scores by the root of the pair's channels": module_fault(
        AttentionCore, lambda self, q, step: attend(self, q * 2**-0.5, step), CORE
    ),
    "eps x 10": config_fault(diffllama, changed(eps=lambda e: 10 * e), ("attn_norm.eps",)),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)
