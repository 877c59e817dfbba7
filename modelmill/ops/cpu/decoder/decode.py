"""All layers for a few tokens in one C++ call (decode.cpp), bit-identical to the separate ops."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace

import numpy as np
import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.decode import (
    DecodeInputs,
    DecodeLayerWeights,
    DecodeLinearWeights,
    DecoderStackWeights,
    decode,
)

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("decode", "pppppdi")
_DTYPE_CODES = build.DTYPE_CODES


# Up to so many tokens go in parts of SMALL_M_LIMIT: two passes over the weights cost less than the
# products of more rows.
MAX_ROWS = 2 * build.SMALL_M_LIMIT


def run(x: torch.Tensor, stack: DecoderStackWeights, tokens: DecodeInputs) -> torch.Tensor:
    """As the reference, which also serves many tokens and tensors with gaps or of other dtypes."""
    packed = stack.packed.get("cpu")
    if packed is None or packed.k is not tokens.k or packed.v is not tokens.v:
        packed = stack.packed["cpu"] = _DecoderAddressTable(stack, tokens.k, tokens.v)
    t, count = tokens, x.shape[0]
    if (
        not packed.supported
        or x.dtype is not packed.dtype
        or count > MAX_ROWS
        or not _supports_token_tensors(t)
    ):
        return decode(x, stack, tokens)
    rows = count if t.logit_rows is None else t.logit_rows.shape[0]
    logits = torch.empty(rows, stack.lm_head.weight.shape[0])
    residual = x.clone(memory_format=torch.contiguous_format)
    if count <= build.SMALL_M_LIMIT:
        _run_all_layers(logits, residual, packed, t, stack.eps)
        return logits
    starts = t.query_start.tolist()
    for first in range(0, count, build.SMALL_M_LIMIT):
        last = min(first + build.SMALL_M_LIMIT, count)
        logit_rows = torch.arange(first, last) if t.logit_rows is None else t.logit_rows
        inside = (logit_rows >= first) & (logit_rows < last)
        part = replace(_slice_tokens(t, starts, first, last), logit_rows=logit_rows[inside] - first)
        part_logits = torch.empty(int(inside.sum()), logits.shape[1])
        _run_all_layers(part_logits, residual[first:last], packed, part, stack.eps)
        logits[slice(first, last) if t.logit_rows is None else inside] = part_logits
    return logits


def _slice_tokens(t: DecodeInputs, starts: list[int], first: int, last: int) -> DecodeInputs:
    """Tokens first … last - 1 of a step.

    Earlier parts have written their keys and values when a later one runs.
    """
    begin = bisect_right(starts, first) - 1
    end = bisect_left(starts, last)
    inner = [min(max(at, first), last) - first for at in starts[begin : end + 1]]
    contexts = t.context_lens[begin:end].clone()
    contexts[-1] -= max(starts[end] - last, 0)
    return replace(
        t,
        slots=t.slots[first:last],
        block_tables=t.block_tables[begin:end],
        query_start=torch.tensor(inner, dtype=torch.int32),
        context_lens=contexts,
        cos=None if t.cos is None else t.cos[first:last],
        sin=None if t.sin is None else t.sin[first:last],
        q_scale=None if t.q_scale is None else t.q_scale[first:last],
    )


def _run_all_layers(
    logits: torch.Tensor,
    residual: torch.Tensor,
    packed: _DecoderAddressTable,
    t: DecodeInputs,
    eps: float,
) -> None:
    """One pass over the layers. residual: [count, H], the embeddings, written over."""
    token_words = np.array(
        (
            residual.shape[0],
            t.block_tables.shape[0],
            t.block_tables.shape[1],
            logits.shape[0],
            t.slots.data_ptr(),
            _tensor_address(t.logit_rows),
            t.block_tables.data_ptr(),
            t.query_start.data_ptr(),
            t.context_lens.data_ptr(),
            _tensor_address(t.cos),
            _tensor_address(t.sin),
            _tensor_address(t.q_scale),
        ),
        dtype=np.int64,
    )
    _kernel()(
        logits.data_ptr(),
        residual.data_ptr(),
        packed.stack.ctypes.data,
        packed.layers.ctypes.data,
        token_words.ctypes.data,
        eps,
        _DTYPE_CODES[residual.dtype],
    )


class _DecoderAddressTable:
    """The addresses of a stack's tensors as decode.cpp reads them. supported: whether it can."""

    def __init__(
        self, stack: DecoderStackWeights, k: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]
    ) -> None:
        self.k, self.v = k, v
        self.dtype = dtype = stack.norm.dtype
        _, kv_heads, page_size, dim = k[0].shape
        tensors = [*k, *v, stack.norm, *(t for layer in stack.layers for t in _norm_weights(layer))]
        matrices = [
            m for layer in stack.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)
        ]
        self.supported = (
            dtype in _DTYPE_CODES
            and all(t.dtype is dtype and t.is_contiguous() for t in tensors)
            and all(_supports_linear(m, dtype) for m in (*matrices, stack.lm_head))
            and all((layer.q_norm is None) is (layer.k_norm is None) for layer in stack.layers)
        )
        words = [
            len(stack.layers),
            len(stack.norm),
            stack.heads,
            kv_heads,
            dim,
            page_size,
            stack.norm.data_ptr(),
        ]
        self.stack = np.array([*words, *_linear_address_words(stack.lm_head)], dtype=np.int64)
        self.layers = np.array(
            [_layer_address_words(*each) for each in zip(stack.layers, k, v, strict=True)],
            dtype=np.int64,
        )


def _norm_weights(layer: DecodeLayerWeights) -> list[torch.Tensor]:
    return [
        t for t in (layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm) if t is not None
    ]


def _supports_linear(m: DecodeLinearWeights, dtype: torch.dtype) -> bool:
    if m.group_size:
        assert m.scale is not None, "groups have scales"
        grids = [t for t in (m.scale, m.offset) if t is not None]
        bias = m.bias is None or (m.bias.dtype is dtype and m.bias.is_contiguous())
        alike = m.scale.dtype in (torch.float16, torch.float32) and all(
            t.dtype is m.scale.dtype for t in grids
        )
        return (
            bias
            and alike
            and all(t.is_contiguous() for t in (m.weight, *grids))
            and m.group_size % 32 == 0
        )
    dtype_matches = m.weight.dtype is (dtype if m.scale is None else torch.int8)
    plain = m.weight.is_contiguous() and (
        m.bias is None or (m.bias.dtype is dtype and m.bias.is_contiguous())
    )
    return (
        dtype_matches
        and plain
        and (m.scale is None or (m.scale.dtype is torch.float32 and m.scale.is_contiguous()))
    )


def _layer_address_words(layer: DecodeLayerWeights, k: torch.Tensor, v: torch.Tensor) -> list[int]:
    norms = [
        _tensor_address(t) for t in (layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    ]
    words = [*norms, k.data_ptr(), v.data_ptr(), layer.window or 0]
    for m in (layer.qkv, layer.o, layer.gate_up, layer.down):
        words += _linear_address_words(m)
    return words


def _linear_address_words(m: DecodeLinearWeights) -> list[int]:
    form = 0 if not m.group_size else 4 if m.weight.dtype is torch.uint8 else 8
    half = m.scale is not None and m.scale.dtype is torch.float16
    words = [m.weight.data_ptr(), _tensor_address(m.scale), _tensor_address(m.bias), *m.shape]
    return [*words, _tensor_address(m.offset), m.group_size, int(half), form]


def _tensor_address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _supports_token_tensors(t: DecodeInputs) -> bool:
    """Whether the index and rotation tensors are as decode.cpp reads them."""
    narrow = (t.block_tables, t.query_start, t.context_lens)
    wide, real = (t.slots, t.logit_rows), (t.cos, t.sin, t.q_scale)
    return (
        (t.cos is None) is (t.sin is None)
        and all(n.dtype is torch.int32 and n.is_contiguous() for n in narrow)
        and all(w is None or (w.dtype is torch.int64 and w.is_contiguous()) for w in wide)
        and all(r is None or (r.dtype is torch.float32 and r.is_contiguous()) for r in real)
    )
