"""All layers of a decoder on a few tokens in one call (fused op).

It computes what the other ops compute one after another. An implementation saves the host's work
between them, which takes as long as the arithmetic in a small model. See ``OpDeclaration``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from modelmill.ops import int4_linear as four
from modelmill.ops import int8_group_linear as eight
from modelmill.ops.add_rms_norm import add_rms_norm
from modelmill.ops.attention_cost import (
    count_attended_keys_and_pairs,
    key_bytes_per_token,
    query_counts,
)
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.int4_linear import int4_linear
from modelmill.ops.int8_group_linear import int8_group_linear
from modelmill.ops.int8_linear import int8_linear, quantize
from modelmill.ops.linear import linear
from modelmill.ops.op_cost import OpCost, product_cost
from modelmill.ops.paged_attention import PagedAttentionInputs, paged_attention
from modelmill.ops.rms_norm import rms_norm
from modelmill.ops.rope_cache import RopeCacheInputs, rope_cache
from modelmill.ops.silu_mul import silu_mul


def _count_stack(args: Mapping[str, Any], result: torch.Tensor) -> OpCost:
    """Count all layers and the head; what lies between the ops of a layer is not moved."""
    x, stack, tokens = args["x"], args["stack"], args["tokens"]
    rows = len(x) if tokens.logit_rows is None else len(tokens.logit_rows)
    total = OpCost(nbytes(x, result, stack.norm)) + _count_matrix(stack.lm_head, rows)
    queries, lengths = query_counts(tokens.query_start), tokens.context_lens.tolist()
    for layer, k in zip(stack.layers, tokens.k, strict=True):
        keys, pairs = count_attended_keys_and_pairs(queries, lengths, layer.window)
        read = 2 * keys * key_bytes_per_token(k)
        norms = nbytes(layer.attn_norm, layer.mlp_norm)
        total += product_cost(norms, read, 4 * stack.heads * k.shape[3] * pairs)
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            total += _count_matrix(matrix, len(x))
    return total


def _count_matrix(matrix: DecodeLinearWeights, rows: int) -> OpCost:
    weight_bytes = nbytes(matrix.weight, matrix.scale, matrix.offset, matrix.bias)
    n, k = matrix.shape
    return product_cost(0, weight_bytes, 2 * rows * n * k)


DECLARATION = OpDeclaration(
    fuses=(
        "rms_norm",
        "add_rms_norm",
        "layer_norm",
        "rope_cache",
        "paged_attention",
        "silu_mul",
        "gelu_tanh",
        "linear",
        "int8_linear",
        "int4_linear",
        "int8_group_linear",
    ),
    cost=_count_stack,
)

# The bounds of the matrix products, accumulated over a few layers.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-2, torch.bfloat16: 2.5e-1}


@dataclass(frozen=True, eq=False)
class DecodeLinearWeights:
    """Weight of one linear layer.

    Attributes:
        weight: [N, K] of the activations' dtype, or int8; group-wise as in int4_linear (uint8) or
            int8_group_linear (int8).
        scale: [N] float32 for int8; group-wise as in those ops; None for a floating-point weight.
        bias: [N] or None.
        offset: group-wise offsets or None.
        group_size: columns that share a scale; 0 if the weight is not group-wise.
        in_features: K of a group-wise weight.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    group_size: int = 0
    in_features: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (N, K) of the weight."""
        return self.weight.shape[0], self.in_features if self.group_size else self.weight.shape[1]

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply [T, K] to [T, N]."""
        if self.scale is None:
            return linear(x, self.weight, self.bias)
        if self.group_size:
            product = int4_linear if self.weight.dtype is torch.uint8 else int8_group_linear
            stored = (self.weight, self.scale, self.offset, self.group_size, self.bias)
            return product(GroupwiseLinearInputs(x, *stored))
        return int8_linear(x, self.weight, self.scale, self.bias)


@dataclass(frozen=True, eq=False)
class DecodeLayerWeights:
    """One layer's weights.

    Norms are [H] (q_norm, k_norm: [D] or None). window: tokens of the attention window or None.
    """

    attn_norm: torch.Tensor
    qkv: DecodeLinearWeights
    o: DecodeLinearWeights
    mlp_norm: torch.Tensor
    gate_up: DecodeLinearWeights
    down: DecodeLinearWeights
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    window: int | None = None


@dataclass(frozen=True, eq=False)
class DecoderStackWeights:
    """Layers, the final norm [H] and the LM head.

    packed: what an implementation derived from the weights (its cache).
    """

    layers: tuple[DecodeLayerWeights, ...]
    norm: torch.Tensor
    lm_head: DecodeLinearWeights
    heads: int
    eps: float
    packed: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """Positions and KV cache of the tokens, as in ``paged_attention`` and ``rope_cache``.

    k, v: one page tensor per layer. logit_rows: [R] int64, rows whose logits are computed; None:
    all.
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    max_query: int
    max_context: int
    logit_rows: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None


def decode(x: torch.Tensor, stack: DecoderStackWeights, tokens: DecodeInputs) -> torch.Tensor:
    """Run all layers and the LM head on a few tokens.

    Args:
        x: [T, H], the tokens' embeddings.
        stack: weights of all layers.
        tokens: positions and KV cache; k and v are written.

    Returns:
        Logits [R, V] float32, rounded to x's dtype first.
    """
    t, residual = tokens, None
    for layer, k, v in zip(stack.layers, t.k, t.v, strict=True):
        if residual is None:
            residual, x = x, rms_norm(x, layer.attn_norm, stack.eps)
        else:
            x, residual = add_rms_norm(x, residual, layer.attn_norm, stack.eps)
        rope, norms = (t.cos, t.sin, t.q_scale), (layer.q_norm, layer.k_norm)
        stored = RopeCacheInputs(k, v, t.slots, stack.heads, *rope, *norms, stack.eps)
        q = rope_cache(layer.qkv.matmul(x), stored)
        scale, paging = (
            k.shape[3] ** -0.5,
            (t.block_tables, t.query_start, t.context_lens, t.max_query, t.max_context),
        )
        attended = paged_attention(PagedAttentionInputs(q, k, v, *paging, scale, layer.window))
        x = layer.o.matmul(attended)
        x, residual = add_rms_norm(x, residual, layer.mlp_norm, stack.eps)
        x = layer.down.matmul(silu_mul(layer.gate_up.matmul(x)))
    assert residual is not None, "the decoder has no layers"
    if t.logit_rows is not None:
        x, residual = x[t.logit_rows], residual[t.logit_rows]
    return stack.lm_head.matmul(add_rms_norm(x, residual, stack.norm, stack.eps)[0]).float()


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """One token, a few sequences, a chunk with history, windows, biases, head norms, int8, int4."""
    shapes: list[tuple[str, list[tuple[int, int]], int, int, str, bool]] = [
        ("one", [(1, 40)], 4, 2, "", False),
        ("int8", [(1, 300)], 4, 1, "int8", False),
        ("int4", [(1, 70)], 4, 2, "int4", False),
        ("batch", [(1, 7), (1, 90), (1, 33)], 3, 3, "int8", True),
        ("groups of 8 bits", [(1, 9), (1, 40)], 4, 2, "int8_group", True),
        ("int4 batch", [(2, 9), (1, 40)], 4, 2, "int4", True),
        ("chunk", [(5, 21), (1, 3)], 6, 2, "", True),
    ]
    for seed, (name, lengths, heads, kv_heads, weight_format, extras) in enumerate(shapes):
        if device == "cpu":
            args = _case(lengths, heads, kv_heads, weight_format, extras, dtype, seed)
            yield Case(name, args)


def _case(
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    weight_format: str,
    extras: bool,
    dtype: torch.dtype,
    seed: int,
) -> dict[str, Any]:
    dim = 24
    hidden = 72
    inner = 100
    vocab = 131
    depth = 2
    size = 16
    count = sum(n for n, _ in lengths)

    def random(*shape: int, dtype: torch.dtype = dtype, scale: float = 1.0) -> torch.Tensor:
        return randn(*shape, device="cpu", dtype=dtype, seed=seed + sum(shape), scale=scale)

    def matrix(n: int, k: int) -> DecodeLinearWeights:
        bias = random(n) if extras else None
        weight32 = random(n, k, dtype=torch.float32, scale=k**-0.5)
        if weight_format in ("int4", "int8_group"):
            groupwise = four if weight_format == "int4" else eight
            tensors = groupwise.random_weight(n, k, 32, device="cpu", symmetric=not extras)
            return DecodeLinearWeights(**tensors, bias=bias, group_size=32, in_features=k)
        values, scale = quantize(weight32) if weight_format else (weight32.to(dtype), None)
        return DecodeLinearWeights(values, scale, bias)

    def layer(index: int) -> DecodeLayerWeights:
        q_norm, k_norm = (random(dim) + 1, random(dim) + 1) if extras else (None, None)
        qkv, o = matrix((heads + 2 * kv_heads) * dim, hidden), matrix(hidden, heads * dim)
        window = 20 if extras and index else None
        gate_up, down = matrix(2 * inner, hidden), matrix(hidden, inner)
        return DecodeLayerWeights(
            random(hidden) + 1, qkv, o, random(hidden) + 1, gate_up, down, q_norm, k_norm, window
        )

    pages = [-(-context // size) for _, context in lengths]
    tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for b, n in enumerate(pages):
        tables[b, :n] = torch.arange(n) * len(lengths) + b
    positions = [torch.arange(context - n, context) for n, context in lengths]
    slots = torch.cat(
        [tables[b].long()[p // size] * size + p % size for b, p in enumerate(positions)]
    )
    angle = randn(count, dim // 2, device="cpu", dtype=torch.float32, seed=seed, scale=3.0)

    def caches() -> tuple[torch.Tensor, ...]:
        return tuple(random(max(pages) * len(lengths), kv_heads, size, dim) for _ in range(depth))

    query_start = torch.tensor([0, *(n for n, _ in lengths)]).cumsum(0).to(torch.int32)
    context_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    tokens = DecodeInputs(
        *(caches(), caches(), slots, tables, query_start, context_lens),
        max(n for n, _ in lengths),
        max(context for _, context in lengths),
        torch.tensor([count - 1, 0]) if extras else None,
        angle.cos(),
        angle.sin(),
        torch.linspace(1.0, 1.5, count) if extras else None,
    )
    layers = tuple(layer(i) for i in range(depth))
    stack = DecoderStackWeights(layers, random(hidden) + 1, matrix(vocab, hidden), heads, 1e-5)
    return {"x": random(count, hidden), "stack": stack, "tokens": tokens}
