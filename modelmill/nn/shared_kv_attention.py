"""Attention to the keys and values of an earlier layer (Gemma 4): a layer without a KV cache.

It has queries and an output projection of its own. The spec names the cache that it reads
(``SharedKVQuerySpec``), so that calibration keeps those pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from modelmill.nn import attention_module_specs as module_specs
from modelmill.nn.attention import AttentionCore, AttentionSpec, RopeCosSin
from modelmill.nn.layer_spec import (
    ROPE_VALUE_NAME,
    LinearRowBlock,
    ModuleSpec,
    QuantSiteSpec,
    SharedKVQuerySpec,
)
from modelmill.nn.linear import Linear
from modelmill.nn.norm import QKNormWeight
from modelmill.nn.partition import HeadPartition
from modelmill.nn.step import Step
from modelmill.ops.bound_op import CachedOpBinding
from modelmill.parallel.shard import Range


@dataclass(frozen=True)
class SharedKVAttentionSpec:
    """Sizes and switches of such an attention.

    Attributes:
        attention: Those of an attention with a cache, of whose q and output projection it is made.
        cache: The place of the layer that it reads among those with a KV cache.
    """

    attention: AttentionSpec
    cache: int

    @property
    def partition(self) -> HeadPartition:
        """How ranks divide the heads: as in the layer whose keys they read."""
        return self.attention.partition

    @property
    def quant_sites(self) -> tuple[QuantSiteSpec, ...]:
        """The inputs of the two projections; the values come from another layer's."""
        return QuantSiteSpec("qkv"), QuantSiteSpec("o")

    def build_module(self, cache_index: int) -> SharedKVAttention:  # noqa: ARG002
        """The module, which has no place among the layers with a KV cache."""
        return SharedKVAttention(self)

    def module_specs(self) -> tuple[ModuleSpec, ...]:
        """The modules of ``SharedKVAttention`` as a layer's ``attn``; "attn_input" → "attn_out"."""
        spec = self.attention
        rows = (LinearRowBlock("q", spec.heads * spec.head_dim, "q_heads"),)
        return (
            module_specs.input_projection_spec("q_proj", "q_rows", rows, bias=spec.qkv_bias),
            SharedKVQuerySpec(
                path="attn.rope",
                reads=("q_rows", ROPE_VALUE_NAME),
                writes=("q",),
                reference=("q_rot",),
                tensors=("q_norm.weight",),
                op="rope",
                cache=self.cache,
            ),
            module_specs.attention_core_spec(()),
            module_specs.o_proj_spec(
                spec.hidden, reads="attn", split_columns="q_heads", bias=spec.out_bias
            ),
        )


class SharedKVAttention(nn.Module):
    """q projection → norm and rotate → attend to another layer's pages → output projection."""

    def __init__(self, spec: SharedKVAttentionSpec) -> None:
        super().__init__()
        sizes = spec.attention
        self.kv_heads = sizes.kv_heads
        self.q_proj = Linear(sizes.hidden, sizes.heads * sizes.head_dim, sizes.qkv_bias)
        self.rope = QNormAndRope(sizes)
        self.core = AttentionCore(sizes, spec.cache)
        self.o_proj = Linear(sizes.heads * sizes.head_dim, sizes.hidden, sizes.out_bias)

    def forward(self, x: torch.Tensor, rope: RopeCosSin, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        q = self.rope(self.q_proj(x, step), rope, step)
        return self.o_proj(self.core(q, step), step)

    def keep_local_heads(self, heads: Range, kv_heads: Range) -> None:
        """Keep a rank's heads; ``forward`` then returns a partial sum."""
        self.core.keep_local_heads(heads)
        self.kv_heads = kv_heads[1] - kv_heads[0]


class QNormAndRope(nn.Module):
    """The norm of each query head, and its rotation."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.head_dim, self.eps, self.local_rope = spec.head_dim, spec.eps, spec.local_rope
        self.q_norm = QKNormWeight(spec.head_dim)
        self._norm = CachedOpBinding()

    def forward(self, q: torch.Tensor, rope: RopeCosSin, step: Step) -> torch.Tensor:
        """[T, heads·D] → [T, heads, D]."""
        if self.local_rope and rope.local is not None:
            rope = rope.local
        heads = q.reshape(-1, self.head_dim)
        normed = self._norm(step.ops.rms_norm, heads, self.q_norm.weight, self.eps)
        assert rope.cos is not None, "queries are rotated"
        assert rope.sin is not None, "queries are rotated"
        cos, sin = rope.cos[:, None], rope.sin[:, None]
        first, second = normed.view(len(q), -1, self.head_dim).float().chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return turned.to(q.dtype)
