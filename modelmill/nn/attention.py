"""Self-attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.norm import QKNorm
from modelmill.nn.step import Step
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.rope_cache import RopeCacheInputs
from modelmill.parallel.shard import Shard, partition_heads
from modelmill.parallel.tp_group import TPGroup


@dataclass(frozen=True)
class RopeCosSin:
    """The rotation of one step, computed once for all layers.

    Attributes:
        cos, sin: [T, D/2] float32, or None where nothing rotates.
        q_scale: [T], Qwen v1's logn factors, or None.
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes and switches of one layer's attention."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    eps: float = 1e-6
    window: int | None = None


class Attention(nn.Module):
    """qkv projection → rotate and store → attend → output projection."""

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        super().__init__()
        self.spec = spec
        self.kv_heads = spec.kv_heads
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.qkv_proj = Linear(spec.hidden, width, spec.qkv_bias)
        self.rope_cache = RopeAndCache(spec, layer)
        self.core = AttentionCore(spec, layer)
        self.o_proj = Linear(spec.heads * spec.head_dim, spec.hidden, spec.out_bias)

    def forward(self, x: torch.Tensor, rope: RopeCosSin, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        q = self.rope_cache(self.qkv_proj(x, step), rope, step)
        return self.o_proj(self.core(q, step), step)

    def shard(self, tp_group: TPGroup, alignment_for: Callable[[str], int]) -> None:
        """Keep this rank's heads; ``forward`` then returns a partial sum.

        Args:
            tp_group: The ranks that share the layer.
            alignment_for: Of a child's name, the multiple at which its columns may be cut.
        """
        spec = self.spec
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        shards = partition_heads(heads, kv_heads, dim, tp_group.size, alignment_for("o_proj"))
        shard = shards[tp_group.rank]
        rows = shard.qkv_rows(heads, kv_heads, dim)
        self.qkv_proj.take_shard(Shard.from_rows(self.qkv_proj.shape, *rows))
        columns = shard.q[0] * dim, shard.q[1] * dim
        self.o_proj.take_shard(Shard.from_columns(self.o_proj.shape, columns, tp_group.rank))
        self.rope_cache.heads = shard.q[1] - shard.q[0]
        self.kv_heads = shard.kv[1] - shard.kv[0]


class RopeAndCache(nn.Module):
    """Splits qkv, norms and rotates q and k, writes k and v to their slots, returns q."""

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        super().__init__()
        self.heads = spec.heads
        self.layer = layer
        self.eps = spec.eps
        self.q_norm = QKNorm(spec.head_dim) if spec.qk_norm else None
        self.k_norm = QKNorm(spec.head_dim) if spec.qk_norm else None

    def forward(self, qkv: torch.Tensor, rope: RopeCosSin, step: Step) -> torch.Tensor:
        """[T, (heads + 2·kv_heads)·D] → q [T, heads, D]."""
        return step.ops.rope_cache(qkv, self.op_inputs(rope, step))

    def op_inputs(self, rope: RopeCosSin, step: Step) -> RopeCacheInputs:
        """The inputs of the op ``rope_cache`` beside qkv."""
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        return RopeCacheInputs(
            step.kv.k[self.layer],
            step.kv.v[self.layer],
            step.slots,
            self.heads,
            rope.cos,
            rope.sin,
            rope.q_scale,
            q_norm,
            k_norm,
            self.eps,
            *step.kv.scales(self.layer),
        )


class AttentionCore(nn.Module):
    """Attention of each query over its sequence's pages."""

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = spec.window
        self.scale = spec.head_dim**-0.5

    def forward(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, heads, D] → [T, heads·D]."""
        inputs = PagedAttentionInputs(
            q,
            step.kv.k[self.layer],
            step.kv.v[self.layer],
            step.block_tables,
            step.query_start,
            step.context_lens,
            step.max_query,
            step.max_context,
            self.scale,
            self.window,
            *step.kv.scales(self.layer),
        )
        return step.ops.paged_attention(inputs)
