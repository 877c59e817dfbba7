"""Self-attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.norm import HeadNorm
from modelmill.nn.step import Step
from modelmill.ops.eight_bit import Quantized
from modelmill.parallel.mesh import Mesh
from modelmill.parallel.shard import Part, spread_heads


@dataclass(frozen=True)
class Rope:
    """The rotation of one step, computed once for all layers: cos, sin [T, D/2] float32; q_scale [T] (logn) or None."""

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
    head_norm: bool = False
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
        self.rotate = RotateStore(spec, layer)
        self.mix = Mix(spec, layer)
        self.o_proj = Linear(spec.heads * spec.head_dim, spec.hidden, spec.out_bias)

    def forward(
        self,
        x: torch.Tensor | Quantized,
        rope: Rope,
        step: Step,
        last: Step | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """[T, H] → [T, H]; with ``last`` only the rows that it holds, [R, H] (``nn.last``).

        None where it was added to the residual at once.
        """
        where = self.rotate.where(rope, step)
        q = self.qkv_proj.rotated(x, where, step)
        if q is None:
            q = self.rotate(self.qkv_proj(x, step), where, step)
        if last is not None:
            q, step = q[step.logit_rows], last
        mixed = self.mix(q, step)
        return None if self.o_proj.added(mixed, residual, step) else self.o_proj(mixed, step)

    def split(self, mesh: Mesh, grain: Callable[[str], int]) -> None:
        """Keep this rank's heads; what ``forward`` returns is then a summand. grain: of a child's columns."""
        spec = self.spec
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        mine = spread_heads(heads, kv_heads, dim, mesh.size, grain("o_proj"))[mesh.rank]
        self.qkv_proj.take(Part.of_rows(self.qkv_proj.shape, *mine.rows(heads, kv_heads, dim)))
        self.o_proj.take(Part.of_columns(self.o_proj.shape, (mine.q[0] * dim, mine.q[1] * dim), mesh.rank))
        self.rotate.heads, self.kv_heads = mine.q[1] - mine.q[0], mine.kv[1] - mine.kv[0]


class RotateStore(nn.Module):
    """Splits qkv, norms and rotates q and k, writes k and v to their slots, returns q."""

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        super().__init__()
        self.heads, self.layer, self.eps = spec.heads, layer, spec.eps
        self.q_norm = HeadNorm(spec.head_dim) if spec.head_norm else None
        self.k_norm = HeadNorm(spec.head_dim) if spec.head_norm else None

    def forward(self, qkv: torch.Tensor, where: tuple[Any, ...], step: Step) -> torch.Tensor:
        """[T, (heads + 2·kv_heads)·D] → q [T, heads, D]."""
        return step.ops.rope_cache(qkv, *where)

    def where(self, rope: Rope, step: Step) -> tuple[Any, ...]:
        """What ``rope_cache`` takes behind the projection."""
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        pages = (step.kv.k[self.layer], step.kv.v[self.layer], step.slots)
        turn, scales = (rope.cos, rope.sin, rope.q_scale), step.kv.scales(self.layer)
        return (*pages, self.heads, *turn, q_norm, k_norm, self.eps, *scales)


class Mix(nn.Module):
    """Each query mixes the values of the keys that it sees."""

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.window, self.scale = layer, spec.window, spec.head_dim**-0.5

    def forward(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, heads, D] → [T, heads·D]."""
        return step.ops.paged_attention(
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
