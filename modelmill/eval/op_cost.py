"""Bytes and operations that one op call needs, counted from its arguments."""

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

INT8_DTYPE_NAME, FP8_DTYPE_NAME = "int8", "float8_e4m3fn"


@dataclass(frozen=True)
class OpCost:
    """Bytes and operations of op calls.

    nbytes: bytes read and written, each once. unavoidable_bytes: the part of them that no fusion
    saves: weights of matrix products, keys and values. operations: multiplications and additions of
    the products. int8_operations, fp8_operations: the part of them with 8-bit activations, which
    has a higher rate.
    """

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
        """Operations by 8-bit dtype, as ``RooflineCeilings`` takes them."""
        return {
            dtype: count
            for dtype, count in (
                (INT8_DTYPE_NAME, self.int8_operations),
                (FP8_DTYPE_NAME, self.fp8_operations),
            )
            if count
        }


def op_cost(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> OpCost:
    """Count the bytes and operations of one call of ``op``."""
    if result is None:  # a fused op that declined: the ops that it fuses do the work
        return OpCost()
    called_with = _reference_signature(op).bind(*args, **kwargs).arguments
    bound_args = registry.op_declarations()[op].unpack_inputs(called_with)
    out = nbytes(*_iter_tensors(result))
    if op in ("linear_add", "qkv_rope_cache"):
        x, weight_bytes = bound_args["x"], nbytes(bound_args["weight"], bound_args.get("bias"))
        other_bytes = 2 * out if op == "linear_add" else rope_cache_op_bytes(bound_args, out)
        return OpCost(
            nbytes(x) + weight_bytes + other_bytes,
            weight_bytes,
            2 * x.numel() * bound_args["weight"].shape[0],
        )
    swiglu = op.endswith("_swiglu")
    if op.endswith("linear") or swiglu or op == "linear_gelu":
        # quantized activations are named q
        input_name = "x" if "x" in bound_args else "q"
        x = bound_args[input_name]
        weight_bytes = nbytes(
            *_iter_tensors([value for name, value in bound_args.items() if name != input_name])
        )
        operations = 2 * x.numel() * result.shape[-1] * (2 if swiglu else 1)
        act_dtype = act_8bit_dtype_name(bound_args)
        return OpCost(
            nbytes(x) + weight_bytes + out,
            weight_bytes,
            operations,
            operations * (act_dtype == INT8_DTYPE_NAME),
            operations * (act_dtype == FP8_DTYPE_NAME),
        )
    if op == "paged_attention":
        return attention_cost(bound_args, out)
    if op == "rope_cache":
        return OpCost(nbytes(bound_args["qkv"]) + rope_cache_op_bytes(bound_args, out))
    if op == "latent_rope_cache":
        return OpCost(latent_rope_cache_op_bytes(bound_args))
    if op == "decode":
        return decode_cost(bound_args["stack"], bound_args["tokens"], bound_args["x"], out)
    return OpCost(nbytes(*_iter_tensors(list(bound_args.values()))) + out)


def rope_cache_op_bytes(args: Mapping[str, Any], out: int) -> int:
    """Bytes of the angles, the queries (``out``), and the stored keys and values."""
    stored = args["slots"].numel() * 2 * _key_bytes_per_token(args["k_cache"])
    return nbytes(args.get("cos"), args.get("sin")) + out + stored


def latent_rope_cache_op_bytes(args: Mapping[str, Any]) -> int:
    """Bytes of the latent rows and what is stored of them, the angles, and the queries' ends."""
    q, latent, cos = args["q"], args["latent"], args["cos"]
    rotated = q.shape[0] * q.shape[1] * 2 * cos.shape[1] * q.element_size()
    stored = len(latent) * _key_bytes_per_token(args["k_cache"])
    return nbytes(latent, args["weight"], cos, args["sin"]) + 2 * rotated + stored


def act_8bit_dtype_name(args: Mapping[str, Any]) -> str | None:
    """Name of the activations' dtype if it has 8 bits, else None."""
    x = args.get("x", args.get("q"))
    return (
        str(x.dtype).removeprefix("torch.")
        if isinstance(x, torch.Tensor) and x.dtype.itemsize == 1
        else None
    )


def attention_cost(args: Mapping[str, Any], out: int) -> OpCost:
    """Count an attention call: each key and value is read once; causal pairs only.

    Values that are channels of the keys (``value_dim``) are read with them.
    """
    q, value_dim = args["q"], args.get("value_dim")
    starts = args["query_start"].tolist()
    lengths = args["context_lens"].tolist()
    window = args.get("window")
    keys, pairs = count_attended_keys_and_pairs(
        [b - a for a, b in itertools.pairwise(starts)], lengths, window
    )
    read = (2 if value_dim is None else 1) * keys * _key_bytes_per_token(args["k_cache"])
    channels = q.shape[2] + (value_dim or q.shape[2])
    return OpCost(nbytes(q) + read + out, read, 2 * q.shape[1] * channels * pairs)


def count_attended_keys_and_pairs(
    queries: list[int], contexts: list[int], window: int | None
) -> tuple[int, int]:
    """Count the keys and the query-key pairs of causal attention.

    Args:
        queries: number of queries of each sequence; they are its last tokens.
        contexts: context length of each sequence.
        window: sliding window in tokens, or None.

    Returns:
        Keys that are read, and pairs of a query and a key that it attends to.
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
    """Count a whole-model decode call: all layers and the head."""
    rows = x.shape[0] if tokens.logit_rows is None else tokens.logit_rows.shape[0]
    total = OpCost(nbytes(x) + out + nbytes(stack.norm)) + _matrix_cost(stack.lm_head, rows)
    starts, lengths = tokens.query_start.tolist(), tokens.context_lens.tolist()
    queries = [b - a for a, b in itertools.pairwise(starts)]
    for layer, k in zip(stack.layers, tokens.k, strict=True):
        keys, pairs = count_attended_keys_and_pairs(queries, lengths, layer.window)
        read = 2 * keys * _key_bytes_per_token(k)
        total += OpCost(read, read, 4 * stack.heads * k.shape[3] * pairs)
        total += _layer_cost(layer, x)
    return total


def _layer_cost(layer: DecodeLayerWeights, x: torch.Tensor) -> OpCost:
    total = OpCost(nbytes(layer.attn_norm, layer.mlp_norm))
    for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
        total += _matrix_cost(matrix, x.shape[0])
    return total


def _matrix_cost(matrix: DecodeLinearWeights, rows: int) -> OpCost:
    weight_bytes = nbytes(matrix.weight, matrix.scale, matrix.bias)
    return OpCost(weight_bytes, weight_bytes, 2 * rows * matrix.weight.numel())


def _key_bytes_per_token(kv_cache: torch.Tensor) -> int:
    """Bytes of one token's keys in a cache [pages, kv_heads, page_size, dim].

    An 8-bit cache has a float32 scale per head.
    """
    scale = 4 if kv_cache.element_size() == 1 else 0
    return kv_cache.shape[1] * (kv_cache.shape[3] * kv_cache.element_size() + scale)


def _iter_tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from _iter_tensors(each)


@cache
def _reference_signature(op: str) -> inspect.Signature:
    return inspect.signature(registry.reference(op))
