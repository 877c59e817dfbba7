"""The rotation of queries and keys in front of their norms (Hunyuan).

The op ``rope_cache`` norms first; of rotated heads it norms and stores alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from modelmill.nn.layer_spec import ROPE_VALUE_NAME, ModuleSpec
from modelmill.nn.partition import HeadGroups
from modelmill.nn.step import Step

if TYPE_CHECKING:
    from modelmill.nn.attention import RopeCosSin

QK_ROPE_SPEC = ModuleSpec(
    path="attn.rotation",
    reads=("qkv", ROPE_VALUE_NAME),
    writes=("qkv_rotated",),
    reference=("q_turned", "k_turned", "v"),
    arithmetic="rotary",
    op="rope_cache",
)


class QKRope(nn.Module):
    """qkv [T, (heads + 2·kv_heads)·D] with q and k rotated; v passes through."""

    def __init__(self, groups: HeadGroups) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = groups.kv_heads, groups.head_dim

    def keep_local_kv_heads(self, count: int) -> None:
        """Keep a rank's heads, so many KV heads among them."""
        self.kv_heads = count

    def forward(self, qkv: torch.Tensor, rope: RopeCosSin, step: Step) -> torch.Tensor:  # noqa: ARG002
        """Rotate channels i and i + D/2 of each head of q and k, in float32."""
        assert rope.cos is not None, "the model has a rotation"
        assert rope.sin is not None, "the model has a rotation"
        width = self.kv_heads * self.head_dim
        heads, v = qkv[:, :-width].unflatten(1, (-1, self.head_dim)), qkv[:, -width:]
        first, second = heads.float().chunk(2, -1)
        cos, sin = rope.cos[:, None], rope.sin[:, None]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return torch.cat((turned.to(qkv.dtype).flatten(1), v), -1)
