"""Faults of the rotation in front of norms: refused, with layer and module named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from modelmill.models import hunyuan_v1_dense
from modelmill.nn.attention import RopeAndCache
from modelmill.nn.rope_before_qk_norm import QKRope
from tests.models.family_cases import changed, times
from tests.models.planted_fault import (
    PlantedFault,
    config_fault,
    module_fault,
    refusal_test,
    tensor_fault,
)

FAMILY = "hunyuan_v1_dense"
TURNED = ("attn.rotation.q_turned", "attn.rotation.k_turned")
CACHED = ("attn.rope_cache.q", "attn.rope_cache.k")
rotate = QKRope.forward


def rotation(
    change: Callable[..., torch.Tensor], modules: tuple[str, ...] = TURNED
) -> PlantedFault:
    """Another rotation; ``change`` gets the right one's arguments."""
    return module_fault(QKRope, change, modules)


def by_other_angles(change: Callable[[torch.Tensor], torch.Tensor]) -> PlantedFault:
    """Angles changed."""

    def forward(self: QKRope, qkv: torch.Tensor, rope: Any, step: Any) -> torch.Tensor:
        return rotate(self, qkv, replace(rope, cos=change(rope.cos), sin=change(rope.sin)), step)

    return rotation(forward)


def backwards(self: QKRope, qkv: torch.Tensor, rope: Any, step: Any) -> torch.Tensor:
    return rotate(self, qkv, replace(rope, sin=-rope.sin), step)


def not_at_all(self: QKRope, qkv: torch.Tensor, rope: Any, step: Any) -> torch.Tensor:
    del self, rope, step
    return qkv


def values_too(self: QKRope, qkv: torch.Tensor, rope: Any, step: Any) -> torch.Tensor:
    heads = torch.cat((qkv, qkv[:, : self.kv_heads * self.head_dim]), 1)
    return rotate(self, heads, rope, step)[:, : qkv.shape[1]]


def keys_alone(self: QKRope, qkv: torch.Tensor, rope: Any, step: Any) -> torch.Tensor:
    width = 2 * self.kv_heads * self.head_dim
    return torch.cat((qkv[:, :-width], rotate(self, qkv, rope, step)[:, -width:]), 1)


def queries_alone(self: QKRope, qkv: torch.Tensor, rope: Any, step: Any) -> torch.Tensor:
    width = 2 * self.kv_heads * self.head_dim
    return torch.cat((rotate(self, qkv, rope, step)[:, :-width], qkv[:, -width:]), 1)


def neighbours(self: QKRope, qkv: torch.Tensor, rope: Any, step: Any) -> torch.Tensor:
    pairs = qkv.unflatten(1, (-1, self.head_dim // 2, 2)).transpose(-1, -2).flatten(1)
    turned = rotate(self, pairs, rope, step).unflatten(1, (-1, 2, self.head_dim // 2))
    width = self.kv_heads * self.head_dim
    return torch.cat((turned.transpose(-1, -2).flatten(1)[:, :-width], qkv[:, -width:]), 1)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> PlantedFault:
    return tensor_fault(f"layers.1.attn.rope_cache.{name}.weight", change, CACHED, 1)


def rotated_again(self: Any, qkv: torch.Tensor, rope: Any, step: Any) -> torch.Tensor:
    inputs = self.op_inputs(rope, step)._replace(cos=rope.cos, sin=rope.sin)
    return step.ops.rope_cache(qkv, inputs)


def config(modules: str | tuple[str, ...], **changes: Any) -> PlantedFault:
    return config_fault(hunyuan_v1_dense, changed(**changes), modules)


FAULTS: dict[str, PlantedFault] = {
    "normed, then rotated": config(CACHED, rotates_first=False),
    "backwards": rotation(backwards),
    "not rotated": rotation(not_at_all),
    "values rotated": rotation(values_too, ("attn.rotation.v",)),
    "queries not rotated": rotation(keys_alone),
    "keys not rotated": rotation(queries_alone),
    "neighbouring channels": rotation(neighbours),
    "one token later": by_other_angles(lambda table: table.roll(1, 0)),
    "pairs in the other order": by_other_angles(lambda table: table.flip(1)),
    "rotated twice": module_fault(RopeAndCache, rotated_again, CACHED),
    "base without its factor": config(TURNED, rope=lambda rope: replace(rope, base=10000.0)),
    "eps x 100": config(("attn_norm.eps",), eps=times(100)),
    "norms exchanged": tensor("q_norm", lambda t: t.flip(0)),
    "weight of one channel x 1.05": tensor("k_norm", lambda t: t * torch.linspace(1, 1.05, len(t))),
    "no weight": tensor("q_norm", torch.ones_like),
}


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)
