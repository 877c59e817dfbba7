"""What one call of an op must move and compute: pure counts of its arguments, from which floors are made."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch

from modelmill.ops import shelf
from modelmill.ops.case import nbytes
from modelmill.ops.decode import Layer, Matrix, Stack, Tokens

INT8, FP8 = "int8", "float8_e4m3fn"


@dataclass(frozen=True)
class Count:
    """nbytes: read and written once each. must: of these the weights of products, keys and values, which no fusion
    saves. operations: multiplications and additions of the products. int8, fp8: of these what multiplies activations
    of such a type, faster than others."""

    nbytes: int = 0
    must: int = 0
    operations: int = 0
    int8: int = 0
    fp8: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def narrow(self) -> dict[str, int]:
        """Operations by dtype, as ``Ceilings`` takes them: those of 8 bits."""
        return {kind: number for kind, number in ((INT8, self.int8), (FP8, self.fp8)) if number}


def count(op: str, args: tuple[Any, ...], named: Mapping[str, Any], result: Any) -> Count:
    """The count of a call of an op of the shelf with these arguments and this result."""
    if result is None:  # a spanning op that leaves the work to those that it spans
        return Count()
    given = _signature(op).bind(*args, **named).arguments
    out = nbytes(*_tensors(result))
    if op in ("add_linear", "rope_linear"):
        x, held = given["x"], nbytes(given["weight"], given.get("bias"))
        beside = 2 * out if op == "add_linear" else turned(given, out)
        return Count(nbytes(x) + held + beside, held, 2 * x.numel() * given["weight"].shape[0])
    if op.endswith("linear"):
        # of integers the activations are called q
        read = "x" if "x" in given else "q"
        x = given[read]
        held = nbytes(*_tensors([value for name, value in given.items() if name != read]))
        operations = 2 * x.numel() * result.shape[-1] * (2 if op.startswith("gated") else 1)
        kind = multiplied(given)
        return Count(nbytes(x) + held + out, held, operations, operations * (kind == INT8), operations * (kind == FP8))
    if op == "paged_attention":
        return attention(given, out)
    if op == "rope_cache":
        return Count(nbytes(given["qkv"]) + turned(given, out))
    if op == "decode":
        return whole(given["stack"], given["tokens"], given["x"], out)
    return Count(nbytes(*_tensors(list(given.values()))) + out)


def turned(given: Mapping[str, Any], out: int) -> int:
    """Bytes of angles, of the queries (``out``), and of keys and values that go to slots, in the cache's dtype."""
    stored = given["slots"].numel() * 2 * _token_bytes(given["k_cache"])
    return nbytes(given.get("cos"), given.get("sin")) + out + stored


def multiplied(given: Mapping[str, Any]) -> str | None:
    """The dtype of 8 bits that a product's activations have; None where they have more."""
    x = given.get("x", given.get("q"))
    return str(x.dtype).removeprefix("torch.") if isinstance(x, torch.Tensor) and x.dtype.itemsize == 1 else None


def attention(given: Mapping[str, Any], out: int) -> Count:
    """Each key and value of a context once, however many queries read it; a causal query sees what is before it."""
    q, starts, lengths = given["q"], given["query_start"].tolist(), given["context_lens"].tolist()
    window = given.get("window")
    keys, pairs = attended([b - a for a, b in itertools.pairwise(starts)], lengths, window)
    read = 2 * keys * _token_bytes(given["k_cache"])
    return Count(nbytes(q) + read + out, read, 4 * q.shape[1] * q.shape[2] * pairs)


def attended(queries: list[int], contexts: list[int], window: int | None) -> tuple[int, int]:
    """(keys that are read, pairs of a query and a key that it sees) of sequences whose last tokens are the queries."""
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


def whole(stack: Stack, tokens: Tokens, x: torch.Tensor, out: int) -> Count:
    """All layers and the head in one call."""
    rows = x.shape[0] if tokens.logit_rows is None else tokens.logit_rows.shape[0]
    total = Count(nbytes(x) + out + nbytes(stack.norm)) + _matrix(stack.head, rows)
    starts, lengths = tokens.query_start.tolist(), tokens.context_lens.tolist()
    queries = [b - a for a, b in itertools.pairwise(starts)]
    for layer, k in zip(stack.layers, tokens.k, strict=True):
        keys, pairs = attended(queries, lengths, layer.window)
        read = 2 * keys * _token_bytes(k)
        total += Count(read, read, 4 * stack.heads * k.shape[3] * pairs)
        total += _layer(layer, x)
    return total


def _layer(layer: Layer, x: torch.Tensor) -> Count:
    total = Count(nbytes(layer.attn_norm, layer.mlp_norm))
    for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
        total += _matrix(matrix, x.shape[0])
    return total


def _matrix(matrix: Matrix, rows: int) -> Count:
    held = nbytes(matrix.weight, matrix.scale, matrix.bias)
    return Count(held, held, 2 * rows * matrix.weight.numel())


def _token_bytes(cache_: torch.Tensor) -> int:
    """Bytes of one token's keys in a cache [pages, kv_heads, page_size, dim], with its scales where it has 8 bits."""
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
    return inspect.signature(shelf.reference(op))
