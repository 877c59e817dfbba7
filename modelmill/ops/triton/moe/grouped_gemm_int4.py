"""Grouped products of many tokens with 4-bit weights, converted to 16 bits in registers.

Computes: inner[position, I] = act(gate) · up of the sorted pairs; pairs[pair, H] = inner · downᵀ +
    bias
Dtypes: x and out bfloat16 or float16; packed int4 codes, or (bfloat16) e2m1 with e8m0 scales;
    float32 sums
Layout: row-major; codes [E, N, K / 2] as in ops/int4_linear.py; scales and offsets [E, N, groups]
Range: any M; I and H multiples of 32
Technique: magic-number dequantization, tensor cores with the weight as left operand, bias and gate
    in the epilogue, PDL; for many tokens dequantized first (dequantize_experts.py), then
    grouped_gemm.py
Used by: int4_fused_moe.py

As in int4_linear.py: the low nibbles of 16 bytes are 16 neighbouring columns and the high ones the
next 16, each chunk of a group is two products, and the code's exponent is taken off with the
offsets. E2M1 values are exact in bfloat16, also times their scale.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.triton.common.device import INTERPRETED
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.moe import dequantize_experts, grouped_gemm, moe_align_block_size
from modelmill.ops.triton.moe.grouped_gemm import (
    GROUP,
    activate_and_store_tile,
    add_bias,
    load_block_pairs,
    sum_expert_outputs,
    tile_of_program,
)
from modelmill.ops.triton.moe.moe_decode import gate_constants
from modelmill.ops.triton.moe.moe_decode_int4 import (
    E2M1_LOOKUP_ASM,
    E2M1_REGISTERS_ASM,
    ZERO_POINT,
    has_mxfp4_weights,
)
from modelmill.ops.triton.weight_only_gemm import int4_linear, mxfp4_linear
from modelmill.ops.triton.weight_only_gemm.int4_linear import biased_nibble_product
from modelmill.ops.triton.weight_only_gemm.mxfp4_linear import e2m1_values, e8m0_values

_ASSEMBLY = tl.constexpr(not INTERPRETED)
# $0, $1: values of the low nibbles of four bytes, in pairs; $2, $3: of the high ones; $4: the bytes
_E2M1_TO_BFLOAT16_ASM = tl.constexpr(f"""{{
    {E2M1_REGISTERS_ASM}
    mov.b32 word, $4;{E2M1_LOOKUP_ASM}
    prmt.b32 $0, lower, upper, 0x6240;
    prmt.b32 $2, lower, upper, 0x7351;
    shr.u32 word, word, 16;{E2M1_LOOKUP_ASM}
    prmt.b32 $1, lower, upper, 0x6240;
    prmt.b32 $3, lower, upper, 0x7351;
    }}""")
# pairs of an expert, on average, from which it is dequantized first: of integers, of e2m1
DEQUANT_MIN_PAIRS_PER_EXPERT, DEQUANT_MIN_PAIRS_PER_EXPERT_E2M1 = 64, 128
CODE_BIAS_BY_DTYPE = {torch.bfloat16: 128, torch.float16: 1024}
GroupedInt4LaunchConfig = tuple[int, int, int, int]
# (weight rows, columns, stages, warps) by tokens of a tile: of gate and of up each, and of down
LAUNCH_CONFIGS: dict[int, tuple[GroupedInt4LaunchConfig, GroupedInt4LaunchConfig]] = {
    16: ((128, 128, 3, 8), (64, 128, 4, 4)),
    32: ((64, 128, 4, 4), (64, 128, 4, 4)),
    64: ((64, 128, 3, 4), (128, 128, 3, 8)),
}
LAUNCH_CONFIGS_E2M1: dict[int, tuple[GroupedInt4LaunchConfig, GroupedInt4LaunchConfig]] = {
    16: ((64, 64, 5, 4), (64, 128, 4, 4)),
    32: ((64, 128, 4, 4), (64, 128, 4, 4)),
    128: ((128, 64, 4, 8), (128, 64, 4, 8)),
}


def _tokens_per_tile(inputs: FusedMoEInputs) -> int:
    """Tokens of a tile: about as many as an expert has on average."""
    average = inputs.topk_ids.numel() / inputs.num_experts
    tiles = _launch_configs(inputs)
    return next((size for size in tiles if average <= size), max(tiles))


def _launch_configs(
    inputs: FusedMoEInputs,
) -> dict[int, tuple[GroupedInt4LaunchConfig, GroupedInt4LaunchConfig]]:
    return LAUNCH_CONFIGS_E2M1 if has_mxfp4_weights(inputs) else LAUNCH_CONFIGS


def run(inputs: FusedMoEInputs) -> torch.Tensor:
    """Run the op: alignment, two grouped products and the sum over a token's experts."""
    min_pairs = (
        DEQUANT_MIN_PAIRS_PER_EXPERT_E2M1
        if has_mxfp4_weights(inputs)
        else DEQUANT_MIN_PAIRS_PER_EXPERT
    )
    if dequantize_experts.should_dequantize_experts(inputs, min_pairs):
        return grouped_gemm.run(inputs, dequantize=_replace_with_dequantized_weight)
    x, ids = inputs.x, inputs.topk_ids
    (tokens, hidden), top_k, experts = x.shape, ids.shape[1], len(inputs.gate_up)
    inner_size = inputs.gate_up.shape[1] // 2
    block = _tokens_per_tile(inputs)
    order = moe_align_block_size.run(ids, block, experts)
    inner = torch.empty((len(order[0]), inner_size), dtype=x.dtype, device=x.device)
    by_pair = torch.empty((tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    first, second = _launch_configs(inputs)[block]
    for tile, source, out, name in ((first, x, inner, "gate_up"), (second, inner, by_pair, "down")):
        _launch_grouped_gemm(inputs, tile, source, out, order, name)
    return sum_expert_outputs(by_pair, inputs)


def _replace_with_dequantized_weight(inputs: FusedMoEInputs, name: str) -> FusedMoEInputs:
    """The inputs with one matrix of each expert in x's dtype."""
    module = mxfp4_linear if has_mxfp4_weights(inputs) else int4_linear
    return dequantize_experts.replace_with_dequantized_weight(
        inputs, name, module.dequantize_weight
    )


def _launch_grouped_gemm(
    inputs: FusedMoEInputs,
    tile: GroupedInt4LaunchConfig,
    x: torch.Tensor,
    out: torch.Tensor,
    order: tuple[torch.Tensor, torch.Tensor],
    name: str,
) -> None:
    """One grouped product, "gate_up" or "down"."""
    parts = ("", "_scale", "_offset", "_bias")
    weight, scale, offset, bias = (getattr(inputs, name + part) for part in parts)
    (tokens, top_k), group = inputs.topk_ids.shape, inputs.group
    (rows, columns, stages, warps), (n, k) = tile, (out.shape[1], x.shape[1])
    e2m1 = has_mxfp4_weights(inputs)
    # the codes of integers share a scale in a chunk: two products of half of its columns each
    chunk = columns if e2m1 else math.gcd(group, columns)
    blocks, tiles = len(order[1]), -(-n // rows)
    pdl = pdl_launch_options(x.device, tokens)
    fixed = (n, k, x.stride(0), weight.shape[2], scale.shape[2])
    _launcher(
        (blocks * tiles, 1, 1),
        (
            x, weight, scale, scale if offset is None else offset, x if bias is None else bias,
            *order, out,
        ),
        (blocks, tiles, tokens * top_k, *fixed), fixed,
        (
            top_k, name == "gate_up", e2m1, offset is not None, bias is not None,
            *gate_constants(inputs), ZERO_POINT, group, chunk,
            k % chunk == 0, CODE_BIAS_BY_DTYPE[x.dtype], GROUP, len(order[0]) // blocks, rows,
            pdl["PDL"],
        ),
        {"num_warps": warps, "num_stages": stages, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "tiles", "pairs"])
def _grouped_kernel(
    x_ptr, weight_ptr, scale_ptr, offset_ptr, bias_ptr, sorted_ptr, experts_ptr, out_ptr,
    blocks, tiles, pairs, n, k, x_stride, width, groups,
    TOP_K: tl.constexpr, GATED: tl.constexpr, E2M1: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
    EVEN: tl.constexpr, CODE_BIAS: tl.constexpr, TILE_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait_and_trigger(PDL)
    block, tile, expert = tile_of_program(experts_ptr, blocks, tiles, TILE_GROUP)
    if expert >= 0:
        position, pair, source = load_block_pairs(sorted_ptr, block, pairs, TOP_K, GATED, BLOCK_M)
        row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        weight_row = expert * (2 * n if GATED else n) + tl.minimum(row, n - 1)
        byte = tl.arange(0, CHUNK // 2)
        low = byte // 16 * 32 + byte % 16
        x_at = x_ptr + source[None, :] * x_stride
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        ups = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, k, CHUNK):
            column = start + low
            if EVEN:
                x_low = tl.load(x_at + column[:, None])
                x_high = tl.load(x_at + (column + 16)[:, None])
            else:
                x_low = tl.load(x_at + column[:, None], mask=(column < k)[:, None], other=0.0)
                x_high = tl.load(
                    x_at + (column + 16)[:, None], mask=(column + 16 < k)[:, None], other=0.0
                )
            if E2M1:
                sums = tl.zeros([BLOCK_M], tl.float32)
            else:
                sums = tl.sum(x_low.to(tl.float32), axis=0) + tl.sum(x_high.to(tl.float32), axis=0)
            total += _chunk_product(
                weight_ptr, scale_ptr, offset_ptr, weight_row, start, width, groups, x_low, x_high,
                sums, E2M1, OFFSET, ZERO, GROUP, CHUNK, EVEN, CODE_BIAS,
            )  # fmt: skip
            if GATED:
                ups += _chunk_product(
                    weight_ptr, scale_ptr, offset_ptr, weight_row + n, start, width, groups, x_low,
                    x_high, sums, E2M1, OFFSET, ZERO, GROUP, CHUNK, EVEN, CODE_BIAS,
                )  # fmt: skip
        if BIAS:
            total, ups = add_bias(
                bias_ptr, total, ups, expert, tl.minimum(row, n - 1), n, GATED
            )  # fmt: skip
        activate_and_store_tile(
            out_ptr, total, ups, position, pair, row, n, pairs, GATED, GATE, ALPHA, LIMIT
        )  # fmt: skip


@triton.jit
def _chunk_product(
    weight_ptr, scale_ptr, offset_ptr, weight_row, start, width, groups, x_low, x_high, sums,
    E2M1: tl.constexpr, OFFSET: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    CHUNK: tl.constexpr, EVEN: tl.constexpr, CODE_BIAS: tl.constexpr,
):  # fmt: skip
    """The dequantized product [N, T] of the columns of a chunk, which share a scale if integer."""
    byte = tl.arange(0, CHUNK // 2)
    at = weight_ptr + weight_row[:, None] * width + start // 2 + byte[None, :]
    if EVEN:
        codes = tl.load(at)
    else:
        codes = tl.load(at, mask=(byte < width - start // 2)[None, :], other=0)
    if E2M1:
        scales_at = scale_ptr + (weight_row * groups + start // 32)[:, None] + (byte // 16)[None, :]
        if EVEN:
            scale_codes = tl.load(scales_at)
        else:
            scale_codes = tl.load(scales_at, mask=(byte < width - start // 2)[None, :], other=0)
        w_low, w_high = _e2m1_weights(codes, scale_codes, x_low.dtype)
        low_part = tl.dot(w_low, x_low, input_precision="ieee")
        return tl.dot(w_high, x_high, low_part, input_precision="ieee")
    part = biased_nibble_product(codes, x_low, x_high, CODE_BIAS)
    grid = weight_row * groups + start // GROUP
    scale = tl.load(scale_ptr + grid).to(tl.float32)
    if OFFSET:
        offset = tl.load(offset_ptr + grid).to(tl.float32) - CODE_BIAS * scale
    else:
        offset = -(ZERO + CODE_BIAS) * scale
    return part * scale[:, None] + offset[:, None] * sums[None, :]


@triton.jit
def _e2m1_weights(codes, scale_codes, element: tl.constexpr):
    """The weights of the low and of the high nibbles of bytes, exact in bfloat16."""
    scale = e8m0_values(scale_codes)
    if _ASSEMBLY:
        low, high = tl.inline_asm_elementwise(
            _E2M1_TO_BFLOAT16_ASM, "=r,=r,=r,=r,r", [codes],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
        return low * scale.to(element), high * scale.to(element)
    else:  # noqa: RET505  the interpreter multiplies the bits of bfloat16
        low, high = e2m1_values(codes & 15) * scale, e2m1_values(codes >> 4) * scale
        return low.to(element), high.to(element)


_launcher = CachedLauncher(_grouped_kernel)
