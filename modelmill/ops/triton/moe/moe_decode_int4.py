"""The experts of a few tokens with 4-bit weights: each program reads rows of the chosen experts.

Computes: inner[pair, I] = silu(gate) · up of each pair of a token and its expert; out[M, H] =
    Σ topk_weights · (inner · downᵀ) (+ shared)
Dtypes: x and out bfloat16, float16 or float32; packed int4 codes; float32 sums
Layout: row-major; codes [E, N, K / 2] as in ops/int4_linear.py; scales and offsets [E, N, groups]
Range: any M, meant for few; I and H multiples of 32
Technique: magic-number dequantization of whole 32-bit words, all experts of a token in one program
    (down), PDL
Used by: grouped_gemm_int4.py, int4_fused_moe.py

A word holds columns of two halves of 32: its low nibbles four neighbours, its high ones the four 16
columns further on. A nibble moved to bit 16 and combined with the exponent of 128 is the float32
128 + code. This adds 128 times the sum of x, which the offsets need anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.triton.common.device import power_of_two
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait
from modelmill.ops.triton.moe.moe_decode import FEW_TOKENS, Tile, swiglu

ZERO_POINT = 8  # the code of 0 in a symmetric weight
WORD_COLUMNS = 8
# (rows, words, warps) of a program: of gate and of up each, and of down
GATE_UP_TILE: Tile = (4, 256, 4)
DOWN_TILE: Tile = (4, 32, 4)
MANY_TOKENS_TILE: Tile = (16, 16, 4)  # float32 alone comes here with many


def _tile_config(tile: Tile, tokens: int, width: int) -> Tile:
    """The tile with fewer words for a narrow matrix."""
    rows, words, warps = tile if tokens <= FEW_TOKENS else MANY_TOKENS_TILE
    return rows, min(words, max(4, power_of_two(width // WORD_COLUMNS))), warps


def run(inputs: FusedMoEInputs) -> torch.Tensor:
    """Run the op with two launches."""
    x, ids, group = inputs.x, inputs.topk_ids, inputs.group
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    inner_size = inputs.gate_up.shape[1] // 2
    inner = torch.empty((tokens * top_k, inner_size), dtype=x.dtype, device=x.device)
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    pdl = pdl_launch_options(x.device, tokens)

    rows, words, warps = _tile_config(GATE_UP_TILE, tokens, hidden)
    weight, scale, offset = inputs.gate_up, inputs.gate_up_scale, inputs.gate_up_offset
    assert scale is not None, "see supports"
    blocks = -(-inner_size // rows)
    sizes = (inner_size, hidden, blocks, x.stride(0), scale.shape[2])
    _gate_up_launcher(
        (tokens * top_k * blocks, 1, 1),
        (x, weight.view(torch.int32), scale, scale if offset is None else offset, ids, inner),
        sizes, sizes,
        (
            top_k, offset is not None, ZERO_POINT, group, hidden % (words * WORD_COLUMNS) == 0,
            rows, words, pdl["PDL"],
        ),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip

    rows, words, warps = _tile_config(DOWN_TILE, tokens, inner_size)
    weight, scale, offset = inputs.down, inputs.down_scale, inputs.down_offset
    assert scale is not None, "see supports"
    shared = inputs.shared
    down_sizes = (hidden, inner_size, scale.shape[2])
    _down_launcher(
        (-(-hidden // rows), tokens, 1),
        (
            inner, weight.view(torch.int32), scale, scale if offset is None else offset, ids,
            inputs.topk_weights, inner if shared is None else shared, out,
        ),
        down_sizes, down_sizes,
        (
            top_k, power_of_two(top_k), offset is not None, ZERO_POINT, group,
            shared is not None, inner_size % (words * WORD_COLUMNS) == 0, rows, words, pdl["PDL"],
        ),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip
    return out


@triton.jit
def _gate_up_kernel(
    x_ptr, weight_ptr, scale_ptr, offset_ptr, ids_ptr, out_ptr, inner, k, blocks, x_stride, groups,
    TOP_K: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end repeat the last one
    weight_row = tl.minimum(row, inner - 1)[:, None]
    pdl_wait(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    gate_row = expert * (2 * inner) + weight_row
    token = pair // TOP_K + tl.arange(0, 1)
    x_at = x_ptr + token * x_stride
    inside = tl.arange(0, 1) == 0
    gates = tl.zeros([BLOCK_N, 1, WORDS // 4], tl.float32)
    ups = tl.zeros([BLOCK_N, 1, WORDS // 4], tl.float32)
    for start in range(0, k // 8, WORDS):
        gates += _products(
            x_at, weight_ptr, scale_ptr, offset_ptr, gate_row, inside, start, k, groups,
            OFFSET, ZERO, GROUP, EVEN, WORDS,
        )  # fmt: skip
        ups += _products(
            x_at, weight_ptr, scale_ptr, offset_ptr, gate_row + inner, inside, start, k, groups,
            OFFSET, ZERO, GROUP, EVEN, WORDS,
        )  # fmt: skip
    gate = tl.sum(tl.reshape(gates, [BLOCK_N, WORDS // 4]), axis=1)
    up = tl.sum(tl.reshape(ups, [BLOCK_N, WORDS // 4]), axis=1)
    target = out_ptr + pair * inner + row
    tl.store(target, swiglu(gate, up, out_ptr.dtype.element_ty), mask=row < inner)


@triton.jit
def _down_kernel(
    inner_ptr, weight_ptr, scale_ptr, offset_ptr, ids_ptr, routing_ptr, shared_ptr, out_ptr,
    n, k, groups,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, SHARED: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(row, n - 1)
    token = tl.program_id(1).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    live = slot < TOP_K
    pair = token * TOP_K + slot
    pdl_wait(PDL)
    expert = tl.load(ids_ptr + pair, mask=live, other=0).to(tl.int64)
    routing = tl.load(routing_ptr + pair, mask=live, other=0.0)
    rows = (expert * n)[None, :] + weight_row[:, None]
    x_at = inner_ptr + pair * k
    total = tl.zeros([BLOCK_N, SLOTS, WORDS // 4], tl.float32)
    for start in range(0, k // 8, WORDS):
        total += _products(
            x_at, weight_ptr, scale_ptr, offset_ptr, rows, live, start, k, groups,
            OFFSET, ZERO, GROUP, EVEN and SLOTS == TOP_K, WORDS,
        )  # fmt: skip
    element = out_ptr.dtype.element_ty
    out = tl.sum(total, axis=2).to(element).to(tl.float32)
    out = tl.sum(out * routing[None, :], axis=1)
    if SHARED:
        out += tl.load(shared_ptr + token * n + weight_row).to(tl.float32)
    tl.store(out_ptr + token * n + row, out.to(element), mask=row < n)


@triton.jit
def _products(
    x_at, weight_ptr, scale_ptr, offset_ptr, rows, live, start, k, groups,
    OFFSET: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Dequantized products of runs of 32 columns: [N, S, WORDS / 4].

    x_at: [S] rows of x; rows: [N, S] rows of all experts' weights; live: [S].
    """
    RUNS: tl.constexpr = WORDS // 4
    word = start + tl.arange(0, WORDS)
    column = word // 4 * 32 + word % 4 * 4
    weight_at = weight_ptr + rows[:, :, None] * (k // 8) + word[None, None, :]
    source = x_at[:, None, None] + column[None, :, None] + tl.arange(0, 4)[None, None, :]
    run = start // 4 + tl.arange(0, RUNS)
    grid = rows[:, :, None] * groups + (run * 32 // GROUP)[None, None, :]
    if EVEN:
        words = tl.load(weight_at, eviction_policy="evict_first")
        low = tl.load(source).to(tl.float32)
        high = tl.load(source + 16).to(tl.float32)
        scale = tl.load(scale_ptr + grid).to(tl.float32)
    else:
        there = live[:, None] & (word * 8 < k)[None, :]
        words = tl.load(weight_at, mask=there[None, :, :], other=0)
        low = tl.load(source, mask=there[:, :, None], other=0.0).to(tl.float32)
        high = tl.load(source + 16, mask=there[:, :, None], other=0.0).to(tl.float32)
        runs_there = (live[:, None] & (run * 32 < k)[None, :])[None, :, :]
        scale = tl.load(scale_ptr + grid, mask=runs_there, other=0.0).to(tl.float32)
    if OFFSET:
        if EVEN:
            offset = tl.load(offset_ptr + grid).to(tl.float32)
        else:
            offset = tl.load(offset_ptr + grid, mask=runs_there, other=0.0).to(tl.float32)
        offset -= 128 * scale
    else:
        offset = -(ZERO + 128) * scale
    x0, x1, x2, x3 = _split4(low)
    x4, x5, x6, x7 = _split4(high)
    part = _code(words << 16) * x0[None, :, :]
    part += _code(words << 8) * x1[None, :, :]
    part += _code(words) * x2[None, :, :]
    part += _code(words >> 8) * x3[None, :, :]
    part += _code(words << 12) * x4[None, :, :]
    part += _code(words << 4) * x5[None, :, :]
    part += _code(words >> 4) * x6[None, :, :]
    part += _code(words >> 12) * x7[None, :, :]
    sums = tl.sum(low + high, axis=2)
    sums = tl.sum(tl.reshape(sums, [sums.shape[0], RUNS, 4]), axis=2)
    part = tl.sum(tl.reshape(part, [part.shape[0], part.shape[1], RUNS, 4]), axis=3)
    return part * scale + offset * sums[None, :, :]


@triton.jit
def _code(shifted):
    """128 + the code in bits 16 to 19, as float32."""
    return ((shifted & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def _split4(x):
    """[S, W, 4] → four of [S, W]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


_gate_up_launcher, _down_launcher = CachedLauncher(_gate_up_kernel), CachedLauncher(_down_kernel)
