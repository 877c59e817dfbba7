"""Attention over an image's tokens with positions, in one pass over the keys (arXiv:2205.14135).

Computes: softmax(q · Kᵀ · scale (+ bias)) · V per window and head over an image's tokens
Dtypes: float32, bfloat16 or float16
Layout: qkv read in place, windows never copied; contiguous channels
Range: a table of biases by offset, or no positions (on a GPU in 16 bits then only in windows); D ≤
    128
Technique: flash attention on tensor cores, keys beyond the edge from fill
Ops: image_attention

A program holds some queries of one window and one head and loops over the window's keys. Windows
are never copied out of the image: a program computes the addresses of its tokens, and keys beyond
the edge are read from ``fill``. Relative positions are computed by ``relative_attention``; here a
table of biases by offset is added, or nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.image_attention import ImageAttentionInputs
from modelmill.ops.triton.attention import relative_attention
from modelmill.ops.triton.attention.online_softmax import softmax_weights
from modelmill.ops.triton.attention.relative_attention import window_of_program
from modelmill.ops.triton.common.device import next_power_of_two
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason

LOG2E = tl.constexpr(1.4426950408889634)


def supports(inputs: ImageAttentionInputs) -> bool:
    """Heads of up to 128 contiguous channels.

    Windows with relative positions as large as shared memory holds their offsets.

    Global attention without positions is left to torch on a GPU: 16 images of 257 tokens take 1.4
    ms per vision encoder there and 3.1 ms here (H200).
    """
    qkv, _, window, _, rel_h, _, bias = inputs
    if qkv.is_cuda and qkv.itemsize == 2 and window is None and rel_h is None and bias is None:
        return False
    height, width = qkv.shape[1:3] if window is None else (window, window)
    if rel_h is not None and not relative_attention.table_fits_shared_memory(qkv, (height, width)):
        return False
    return qkv.stride(-1) == 1 and qkv.shape[-1] <= 128 and qkv.numel() < 1 << 31


def run(inputs: ImageAttentionInputs) -> torch.Tensor:
    """Compute the op with the Triton kernel; same contract as the reference."""
    qkv, heads, window, fill, rel_h, rel_w, bias = inputs
    batch, height, width, _, _, dim = qkv.shape
    win_h, win_w = (height, width) if window is None else (window, window)
    rows, columns = -(-height // win_h), -(-width // win_w)
    out = torch.empty((batch, height, width, heads * dim), dtype=qkv.dtype, device=qkv.device)
    assert fill is not None or (height % win_h == 0 and width % win_w == 0), (
        "windows that reach beyond the edge need fill"
    )
    fill = None if fill is None else fill.to(qkv.dtype).contiguous()
    if rel_h is not None and rel_w is not None:
        relative_attention.relative_attention(qkv, (win_h, win_w), fill, rel_h, rel_w, out)
        return out
    fill_or_dummy, table = qkv if fill is None else fill, qkv if bias is None else bias.contiguous()
    block_m, block_n, warps, stages = _launch_config(win_h * win_w, qkv)
    grid = (-(-(win_h * win_w) // block_m), heads, batch * rows * columns)
    _image_attention_kernel[grid](
        qkv, fill_or_dummy, table, out, dim**-0.5,
        height, width, rows, columns, *qkv.stride()[:5],
        HEADS=heads, DIM=dim, TALL=win_h, WIDE=win_w,
        TABLE=bias is not None, PADDED=fill is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=max(16, next_power_of_two(dim)), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out


def _launch_config(tokens: int, qkv: torch.Tensor) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages) of a block."""
    if qkv.dtype == torch.float32:
        return 16, 32, 4, 1
    return (64, 64, 4, 2) if tokens > 64 else (64, 64, 4, 1)


@triton.jit
def _image_attention_kernel(
    qkv_ptr, fill_ptr, table_ptr, out_ptr, scale,
    height, width, rows, columns, batch_stride, y_stride, x_stride, part_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    TABLE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, batch, top, left = window_of_program(rows, columns, TALL, WIDE)
    qkv_ptr += batch * batch_stride + head * head_stride
    channel = tl.arange(0, BLOCK_D)
    channel_valid = channel < DIM

    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    y, x = top + query // WIDE, left + query % WIDE
    query_valid = (query < TALL * WIDE) & (y < height) & (x < width)
    source = y * y_stride + x * x_stride
    q = tl.load(
        qkv_ptr + source[:, None] + channel, mask=query_valid[:, None] & channel_valid, other=0.0
    )
    out_row = ((batch * height + y) * width + x) * HEADS + head
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, TALL * WIDE, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        ky, kx = key // WIDE, key % WIDE
        key_valid = key < TALL * WIDE
        inside = key_valid & (top + ky < height) & (left + kx < width)
        at = (top + ky) * y_stride + (left + kx) * x_stride + part_stride
        k = tl.load(
            qkv_ptr + at[:, None] + channel, mask=inside[:, None] & channel_valid, other=0.0
        )
        v = tl.load(
            qkv_ptr + (at + part_stride)[:, None] + channel,
            mask=inside[:, None] & channel_valid,
            other=0.0,
        )
        if PADDED:
            fill = tl.load(fill_ptr + (HEADS + head) * DIM + channel, mask=channel_valid, other=0.0)
            k = tl.where(inside[:, None], k, fill[None, :])
            fill = tl.load(
                fill_ptr + (2 * HEADS + head) * DIM + channel, mask=channel_valid, other=0.0
            )
            v = tl.where(inside[:, None], v, fill[None, :])
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        if TABLE:
            distance = tl.abs((query // WIDE)[:, None] - ky) * WIDE + tl.abs(
                (query % WIDE)[:, None] - kx
            )
            pair_valid = query_valid[:, None] & key_valid
            score += (
                tl.load(table_ptr + head * TALL * WIDE + distance, mask=pair_valid, other=0.0).to(
                    tl.float32
                )
                * LOG2E
            )
        score = tl.where(key_valid, score, float("-inf"))
        new_max, rescale, weight = softmax_weights(score, row_max)
        exp_sum = exp_sum * rescale + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    acc /= exp_sum[:, None]
    target = out_ptr + out_row[:, None] * DIM + channel
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=query_valid[:, None] & channel_valid)
