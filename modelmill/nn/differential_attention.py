"""Differential attention: the difference of two softmax maps (arXiv:2410.05258).

Heads come in pairs; so do KV heads. A pair's queries q₁, q₂ and keys k₁, k₂ make two maps, each of
which reads both values v₁ | v₂: norm(A₁V − λ A₂V) · (1 − λ₀). In the pages each pair of KV heads is
four, with k₁, k₁, k₂, k₂ and v₁, v₂, v₁, v₂, so that any attention kernel computes the products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from modelmill.nn.attention import AttentionCore, AttentionSpec, RopeAndCache, RopeCosSin
from modelmill.nn.attention_module_specs import (
    attention_core_spec,
    input_projection_spec,
    o_proj_spec,
)
from modelmill.nn.layer_spec import (
    ROPE_VALUE_NAME,
    LinearRowBlock,
    ModuleSpec,
    QuantSiteSpec,
    RopeCacheSpec,
)
from modelmill.nn.linear import Linear
from modelmill.nn.partition import HeadGroups, HeadPartition
from modelmill.nn.step import Step
from modelmill.parallel.shard import Range

KV_HEAD_COPIES_PER_PAIR = 4
"""KV heads in the pages for each pair."""
LAMBDA_TENSOR_NAMES = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


@dataclass(frozen=True)
class DifferentialAttentionSpec:
    """Sizes of one layer's attention.

    Attributes:
        heads, kv_heads: Those of the checkpoint, both even.
        bias: Of all projections.
        lambda_init: λ₀.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    eps: float
    lambda_init: float

    @property
    def head_pair_groups(self) -> HeadGroups:
        """The pairs of query heads, and the pairs of KV heads that they read."""
        return HeadGroups(self.heads // 2, self.kv_heads // 2, 2 * self.head_dim)

    @property
    def paged_attention_spec(self) -> AttentionSpec:
        """The attention over the pages."""
        pairs = self.head_pair_groups
        heads, kv_heads = (
            KV_HEAD_COPIES_PER_PAIR * pairs.q_heads,
            KV_HEAD_COPIES_PER_PAIR * pairs.kv_heads,
        )
        return AttentionSpec(self.hidden, heads, kv_heads, self.head_dim, eps=self.eps)

    @property
    def partition(self) -> HeadPartition:
        """How ranks divide the pairs."""
        return HeadPartition("attn", self.head_pair_groups)

    @property
    def quant_sites(self) -> tuple[QuantSiteSpec, ...]:
        """The inputs of the two projections; the second is normed."""
        return QuantSiteSpec("qkv"), QuantSiteSpec("o")

    def build_module(self, cache_index: int) -> DifferentialAttention:
        """The module; ``cache_index``: its place among the layers with a KV cache."""
        return DifferentialAttention(self, cache_index)

    def module_specs(self) -> tuple[ModuleSpec, ...]:
        """The modules as a layer's ``attn``; "attn_input" → "attn_out"."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = (
            LinearRowBlock("q", q, "q_heads"),
            LinearRowBlock("k", kv, "kv_heads"),
            LinearRowBlock("v", kv, "kv_heads"),
        )
        return (
            input_projection_spec("qkv_proj", "qkv", rows, bias=self.bias),
            ModuleSpec(
                path="attn.pairs", reads=("qkv",), writes=("qkv_pairs",),
                reference=("q_pairs", "k_pairs", "v_pairs"), arithmetic="residual", op="copy",
            ),
            RopeCacheSpec(
                path="attn.rope_cache", reads=("qkv_pairs", ROPE_VALUE_NAME), writes=("q",),
                reference=("q_rot",), arithmetic="rotary", cache_reference=("k_rot", "v_pairs"),
                kv_heads=self.paged_attention_spec.kv_heads, head_dim=self.head_dim,
            ),
            attention_core_spec(()),
            ModuleSpec(
                path="attn.difference", reads=("attn",), writes=("difference",),
                reference=("difference",), tensors=LAMBDA_TENSOR_NAMES, op="rms_norm",
            ),
            o_proj_spec(self.hidden, reads="difference", split_columns="q_heads", bias=self.bias),
        )  # fmt: skip


class DifferentialAttention(nn.Module):
    """qkv projection → pairs → rotate and store → attend → difference → output projection."""

    def __init__(self, spec: DifferentialAttentionSpec, cache_index: int) -> None:
        super().__init__()
        self.kv_heads = spec.paged_attention_spec.kv_heads
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self.qkv_proj = Linear(spec.hidden, width, spec.bias)
        self.pairs = RepeatHeadPairs(spec)
        self.rope_cache = RopeAndCache(spec.paged_attention_spec, cache_index)
        self.core = AttentionCore(spec.paged_attention_spec, cache_index)
        self.difference = HeadPairDifference(spec)
        self.o_proj = Linear(spec.heads * spec.head_dim, spec.hidden, spec.bias)

    def forward(self, x: torch.Tensor, rope: RopeCosSin, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        qkv = self.pairs(self.qkv_proj(x, step), step)
        out = self.core(self.rope_cache(qkv, rope, step), step)
        return self.o_proj(self.difference(out, step), step)

    def keep_local_heads(self, heads: Range, kv_heads: Range) -> None:
        """Keep a rank's pairs; ``forward`` then returns a partial sum."""
        pairs = kv_heads[1] - kv_heads[0]
        self.kv_heads = KV_HEAD_COPIES_PER_PAIR * pairs
        self.pairs.keep_local_kv_head_pairs(pairs)
        self.difference.keep_local_kv_head_pairs(pairs)
        self.rope_cache.keep_local_heads(KV_HEAD_COPIES_PER_PAIR * (heads[1] - heads[0]))


class HeadPairShardedModule(nn.Module):
    """A module that keeps a rank's pairs of KV heads."""

    def __init__(self, spec: DifferentialAttentionSpec) -> None:
        super().__init__()
        self.spec, self.kv_pairs = spec, spec.head_pair_groups.kv_heads

    def keep_local_kv_head_pairs(self, count: int) -> None:
        """Keep so many pairs of KV heads."""
        self.kv_pairs = count


class RepeatHeadPairs(HeadPairShardedModule):
    """Heads as the pages have them: of each pair of KV heads four, with the queries of each."""

    def forward(self, qkv: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, q | k | v], pair by pair, → [T, q | k | v] of all copies."""
        tokens, dim = len(qkv), self.spec.head_dim
        kv = self.kv_pairs * 2 * dim
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv, kv, kv], 1)
        q = q.view(tokens, self.kv_pairs, -1, 2, dim).transpose(2, 3)[:, :, :, None]
        q = q.expand(-1, -1, -1, 2, -1, -1)  # both maps read both values
        k = k.view(tokens, self.kv_pairs, 2, 1, dim).expand(-1, -1, -1, 2, -1)
        v = v.view(tokens, self.kv_pairs, 1, 2, dim).expand(-1, -1, 2, -1, -1)
        return torch.cat([each.reshape(tokens, -1) for each in (q, k, v)], 1)


class HeadPairDifference(HeadPairShardedModule):
    """norm(A₁V − λ A₂V) · (1 − λ₀), in float32; λ = exp(q₁·k₁) − exp(q₂·k₂) + λ₀, learned."""

    def __init__(self, spec: DifferentialAttentionSpec) -> None:
        super().__init__(spec)
        for name in LAMBDA_TENSOR_NAMES:
            self.register_buffer(name, torch.empty(spec.head_dim, device="meta"))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, outputs of all copies] → [T, heads·D]."""
        spec = self.spec
        maps = x.view(len(x), self.kv_pairs, 2, 2, -1, spec.head_dim).float()
        first, second = maps.permute(2, 0, 1, 4, 3, 5).flatten(-2)  # [T, pairs, group, 2·D] each
        out = first - self.compute_lambda() * second
        scale = torch.rsqrt(out.square().mean(-1, keepdim=True) + spec.eps)
        return (out * scale * (1 - spec.lambda_init)).flatten(1).to(x.dtype)

    def compute_lambda(self) -> torch.Tensor:
        """λ, float32."""
        q1, k1, q2, k2 = (self.get_buffer(name).float() for name in LAMBDA_TENSOR_NAMES)
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.spec.lambda_init


def lambda_init(layer: int) -> float:
    """λ₀ of a layer, the first one 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)
