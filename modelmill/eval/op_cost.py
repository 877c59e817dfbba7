"""What one call of an op must move and compute: pure counts of its arguments, from which floors are
made.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch

from modelmill.ops import registry
from modelmill.ops.case import nbytes
from modelmill.ops.decode import (
    DecodeInputs,
    DecodeLayerWeights,
    DecodeLinearWeights,
    DecoderStackWeights,
)

INT8, FP8 = "int8", "float8_e4m3fn"


@dataclass(frozen=True)
class OpCost:
    """nbytes: read and written once each. unavoidable_bytes: of these the weights of products, keys
    and values, which no fusion saves. operations: multiplications and additions of the products.
    int8_operations, fp8_operations: of these what multiplies activations of such a type, faster
    than others."""

    nbytes: int = 0
    unavoidable_bytes: int = 0
    operations: int = 0
    int8_operations: int = 0
    fp8_operations: int = 0

    def __add__(self, other: OpCost) -> OpCost:
        return OpCost(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )

    @property
    def ops_by_8bit_dtype(self) -> dict[str, int]:
        """Operations by dtype, as ``Roofline`` takes them: those of 8 bits."""
        return {
            kind: number
            for kind, number in ((INT8, self.int8_operations), (FP8, self.fp8_operations))
            if number
        }


def op_cost(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> OpCost:
    """The count of a call of an op with these arguments and this result."""
    if result is None:  # a fused op that leaves the work to those that it joins
        return OpCost()
    given = _signature(op).bind(*args, **kwargs).arguments
    out = nbytes(*_tensors(result))
    if op in ("linear_add", "qkv_rope_cache"):
        x, held = given["x"], nbytes(given["weight"], given.get("bias"))
        beside = 2 * out if op == "linear_add" else rope_bytes(given, out)
        return OpCost(nbytes(x) + held + beside, held, 2 * x.numel() * given["weight"].shape[0])
    swiglu = op.endswith("_swiglu")
    if op.endswith("linear") or swiglu or op == "linear_gelu":
        # of integers the activations are called q
        read = "x" if "x" in given else "q"
        x = given[read]
        held = nbytes(*_tensors([value for name, value in given.items() if name != read]))
        operations = 2 * x.numel() * result.shape[-1] * (2 if swiglu else 1)
        kind = act_8bit_dtype(given)
        return OpCost(
            nbytes(x) + held + out,
            held,
            operations,
            operations * (kind == INT8),
            operations * (kind == FP8),
        )
    if op == "paged_attention":
        return attention_cost(given, out)
    if op == "rope_cache":
        return OpCost(nbytes(given["qkv"]) + rope_bytes(given, out))
    if op == "decode":
        return decode_cost(given["stack"], given["tokens"], given["x"], out)
    return OpCost(nbytes(*_tensors(list(given.values()))) + out)


def rope_bytes(args: Mapping[str, Any], out: int) -> int:
    """Bytes of angles, of the queries (``out``), and of keys and values that go to slots, in the
    cache's dtype.
    """
    stored = args["slots"].numel() * 2 * _token_bytes(args["k_cache"])
    return nbytes(args.get("cos"), args.get("sin")) + out + stored


def act_8bit_dtype(args: Mapping[str, Any]) -> str | None:
    """The dtype of 8 bits that a product's activations have; None where they have more."""
    x = args.get("x", args.get("q"))
    return (
        str(x.dtype).removeprefix("torch.")
        if isinstance(x, torch.Tensor) and x.dtype.itemsize == 1
        else None
    )


def attention_cost(args: Mapping[str, Any], out: int) -> OpCost:
    """Each key and value of a context once, however many queries read it; a causal query sees what
    is before it.
    """
    q, starts, lengths = args["q"], args["query_start"].tolist(), args["context_lens"].tolist()
    window = args.get("window")
    keys, pairs = attended_keys([b - a for a, b in itertools.pairwise(starts)], lengths, window)
    read = 2 * keys * _token_bytes(args["k_cache"])
    return OpCost(nbytes(q) + read + out, read, 4 * q.shape[1] * q.shape[2] * pairs)


def attended_keys(queries: list[int], contexts: list[int], window: int | None) -> tuple[int, int]:
    """(keys that are read, pairs of a query and a key that it sees) of sequences whose last tokens
    are the queries.
    """
    keys = pairs = 0
    for new, context in zip(queries, contexts, strict=True):
        new = min(new, context)
        if window is None or window >= context:
            keys += context
            pairs += new * context - new * (new - 1) // 2
        else:
            keys += min(context, window + new - 1)
            pairs += sum(min(context - new + 1 + i, window) for i in range(new))
    return keys, pairs


def decode_cost(
    stack: DecoderStackWeights, tokens: DecodeInputs, x: torch.Tensor, out: int
) -> OpCost:
    """All layers and the head in one call."""
    rows = x.shape[0] if tokens.logit_rows is None else tokens.logit_rows.shape[0]
    total = OpCost(nbytes(x) + out + nbytes(stack.norm)) + _matrix_cost(stack.lm_head, rows)
    starts, lengths = tokens.query_start.tolist(), tokens.context_lens.tolist()
    queries = [b - a for a, b in itertools.pairwise(starts)]
    for layer, k in zip(stack.layers, tokens.k, strict=True):
        keys, pairs = attended_keys(queries, lengths, layer.window)
        read = 2 * keys * _token_bytes(k)
        total += OpCost(read, read, 4 * stack.heads * k.shape[3] * pairs)
        total += _layer_cost(layer, x)
    return total


def _layer_cost(layer: DecodeLayerWeights, x: torch.Tensor) -> OpCost:
    total = OpCost(nbytes(layer.attn_norm, layer.mlp_norm))
    for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
        total += _matrix_cost(matrix, x.shape[0])
    return total


def _matrix_cost(matrix: DecodeLinearWeights, rows: int) -> OpCost:
    held = nbytes(matrix.weight, matrix.scale, matrix.bias)
    return OpCost(held, held, 2 * rows * matrix.weight.numel())


def _token_bytes(cache_: torch.Tensor) -> int:
    """Bytes of one token's keys in a cache [pages, kv_heads, page_size, dim], with its scales where
    it has 8 bits.
    """
    scale = 4 if cache_.element_size() == 1 else 0
    return cache_.shape[1] * (cache_.shape[3] * cache_.element_size() + scale)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from _tensors(each)


@cache
def _signature(op: str) -> inspect.Signature:
    return inspect.signature(registry.reference(op))
