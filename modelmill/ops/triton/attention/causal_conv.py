"""Short causal convolution, decodes and prompts of all sequences in one launch.

Computes: out[T, C] = convolution of x[T, C'] + bias, or SiLU of it, the last inputs of each
    sequence [W − 1, C], and a snapshot of them
Dtypes: x, state, weight and bias bfloat16, float16 or float32; float32 arithmetic
Layout: rows of x with a stride; states by slot, read and written in place
Range: W up to 16, any C
Technique: a program for a sequence, a block of channels and some blocks of tokens, of which the
    first alone reads and writes the state
Ops: causal_conv

Terms are added from the oldest token on, so that a token's result does not depend on how many
tokens a step has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.causal_conv import CausalConvInputs
from modelmill.ops.triton.common.device import (
    next_power_of_two,
    unavailable_reason_for_portable_kernel,
)

unavailable_reason = unavailable_reason_for_portable_kernel

MAX_WIDTH = 16
BLOCK_T, BLOCKS_PER_PROGRAM = 32, 8  # tokens of a block


def supports(inputs: CausalConvInputs) -> bool:
    """Rows, weights and states that lie together."""
    channels, width = inputs.weight.shape
    return (
        width <= MAX_WIDTH
        and inputs.x.stride(1) == 1
        and inputs.weight.is_contiguous()
        and (inputs.bias is None or inputs.bias.is_contiguous())
        and inputs.state.stride()[1:] == (channels, 1)
    )


def run(inputs: CausalConvInputs) -> torch.Tensor:
    """Compute the op with the Triton kernel; same contract as the reference."""
    x, state, weight, bias, rows, silu = inputs
    channels, width = weight.shape
    decode = rows.is_decode
    make = torch.empty if decode else torch.zeros  # a prompt may be padded
    out = make((len(x), channels), dtype=x.dtype, device=x.device)
    block_c = min(128 if decode else 64, next_power_of_two(channels))
    block_t, blocks = (1, 1) if decode else (BLOCK_T, BLOCKS_PER_PROGRAM)
    grid = len(rows.slots), -(-channels // block_c), -(-rows.max_query // (block_t * blocks))
    _causal_conv_kernel[grid](
        x, weight, weight if bias is None else bias, state, out, rows.query_start, rows.positions,
        rows.slots, rows.snapshot_slots, rows.snapshot_ends, channels, x.stride(0), state.stride(0),
        WIDTH=width, HAS_BIAS=bias is not None, SILU=silu, BLOCK_T=block_t, BLOCK_C=block_c,
        BLOCK_W=next_power_of_two(width - 1), BLOCKS=blocks, num_warps=1 if decode else 4,
    )  # fmt: skip
    return out


@triton.jit
def _causal_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, start_ptr, position_ptr, slot_ptr,
    snapshot_slot_ptr, snapshot_end_ptr, channels, row_stride, slot_stride, WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    sequence, part = tl.program_id(0), tl.program_id(2)
    start = tl.load(start_ptr + sequence).to(tl.int64)
    count = tl.load(start_ptr + sequence + 1).to(tl.int64) - start
    if count > part * BLOCK_T * BLOCKS:
        c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = c < channels
        first = tl.load(position_ptr + start)
        state = state_ptr + tl.load(slot_ptr + sequence) * slot_stride
        x = x_ptr + start * row_stride
        last = tl.minimum((part + 1) * BLOCKS, (count + BLOCK_T - 1) // BLOCK_T)
        for block in range(part * BLOCKS, last):
            t = block * BLOCK_T + tl.arange(0, BLOCK_T)
            total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
            for j in tl.static_range(WIDTH):
                term = _load_window(
                    x, state, t + j, t < count, c, inside, first, channels, row_stride,
                               WIDTH)  # fmt: skip
                factor = tl.load(weight_ptr + c * WIDTH + j, mask=inside, other=0.0)
                total += term.to(tl.float32) * factor.to(tl.float32)[None, :]
            if HAS_BIAS:
                bias = tl.load(bias_ptr + c, mask=inside, other=0.0)
                total += bias.to(tl.float32)[None, :]
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            place = out_ptr + (start + t[:, None]) * channels + c[None, :]
            tl.store(place, total.to(out_ptr.dtype.element_ty),
                     mask=(t < count)[:, None] & inside[None, :])  # fmt: skip
        if part == 0:
            w = tl.arange(0, BLOCK_W)
            place = w[:, None] * channels + c[None, :]
            mask = (w < WIDTH - 1)[:, None] & inside[None, :]
            kept = tl.load(snapshot_end_ptr + sequence) - first
            if (kept >= 0) & (kept <= count):
                rows = _load_window(
                    x, state, kept + w, w < WIDTH - 1, c, inside, first, channels,
                               row_stride, WIDTH)  # fmt: skip
                snapshot = state_ptr + tl.load(snapshot_slot_ptr + sequence) * slot_stride
                tl.store(snapshot + place, rows, mask=mask)
            rows = _load_window(
                    x, state, count + w, w < WIDTH - 1, c, inside, first, channels,
                           row_stride, WIDTH)  # fmt: skip
            tl.debug_barrier()  # other threads have read the rows that are written now
            tl.store(state + place, rows, mask=mask)


@triton.jit
def _load_window(
    x, state, index, valid, c, inside, first, channels, row_stride, WIDTH: tl.constexpr
):  # fmt: skip
    """Rows of the state, then of x, by their index among both; x's dtype is kept."""
    old = index < WIDTH - 1
    mask = valid[:, None] & inside[None, :]
    kept = tl.load(
        state + index[:, None] * channels + c[None, :],
        mask=mask & old[:, None], other=0.0,
    )  # fmt: skip
    kept = tl.where(first > 0, kept, 0.0)
    new = tl.load(
        x + (index - (WIDTH - 1))[:, None] * row_stride + c[None, :],
        mask=mask & (index >= WIDTH - 1)[:, None], other=0.0,
    )  # fmt: skip
    return tl.where(old[:, None], kept.to(new.dtype), new)
