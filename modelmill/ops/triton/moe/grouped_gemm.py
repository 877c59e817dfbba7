"""Grouped products of many tokens: tiles of one expert's sorted tokens on tensor cores.

Computes: inner[position, I] = act(gate) · up, or act(up), of the sorted pairs; pairs[pair, H] =
    inner · downᵀ + bias; out[M, H] = Σ topk_weights · pairs (+ shared)
Dtypes: x and out bfloat16 or float16; weights of x's dtype, or int8 or e4m3 with a scale for each
    row, x and inner then also quantized to 8 bits; float32 sums (int8 · int8: int32)
Layout: row-major; weights [E, N, K]; inner in the order of moe_align_block_size
Range: any M, any I and H
Technique: tensor cores with the weight as left operand, tiles in an order that shares weights in
    L2, bias and gate in the epilogue, PDL
Used by: experts.py, grouped_gemm_int4.py

A tile without tokens ends at once: the number of tiles depends on the shapes alone, so that a CUDA
graph replays every routing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from modelmill.ops.fused_moe import RELU2, FusedMoEInputs
from modelmill.ops.triton.common.device import max_shared_bytes, next_power_of_two
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.moe import moe_align_block_size
from modelmill.ops.triton.moe.moe_decode import (
    gate_constants,
    gated_activation,
    quantize_rows_if_needed,
)


class GroupedLaunchConfig(NamedTuple):
    """Tile of a grouped product.

    Attributes:
        tokens: sorted tokens of one expert.
        rows: of the weight; of gate and up each.
        columns: of a step of the loop.
        stages: of the software pipeline.
        warps: of a program.
    """

    tokens: int
    rows: int
    columns: int
    stages: int
    warps: int


# (gate and up, down) by tokens of a tile
LAUNCH_CONFIGS: dict[int, tuple[GroupedLaunchConfig, GroupedLaunchConfig]] = {
    16: (GroupedLaunchConfig(16, 64, 128, 4, 4), GroupedLaunchConfig(16, 64, 128, 4, 4)),
    32: (GroupedLaunchConfig(32, 64, 128, 3, 4), GroupedLaunchConfig(32, 64, 128, 4, 4)),
    64: (GroupedLaunchConfig(64, 128, 64, 4, 8), GroupedLaunchConfig(64, 128, 64, 4, 4)),
    128: (GroupedLaunchConfig(128, 128, 64, 3, 8), GroupedLaunchConfig(128, 128, 64, 4, 8)),
}
# 64 tokens of 8-bit weights: gate and up
GATE_UP_LAUNCH_CONFIG_8BIT = GroupedLaunchConfig(64, 64, 64, 4, 4)
_RELU2 = tl.constexpr(RELU2)
GROUP = 8  # tiles of tokens that share tiles of the weight in L2


def _tokens_per_tile(inputs: FusedMoEInputs) -> int:
    """Tokens of a tile: about as many as an expert has on average."""
    average = inputs.topk_ids.numel() / inputs.num_experts
    return next((size for size in LAUNCH_CONFIGS if average <= size), 128)


def _fit_launch_config(
    tile: GroupedLaunchConfig, width: int, stage_bytes: int, shared: int
) -> GroupedLaunchConfig:
    """The tile with fewer columns for a narrow matrix, and stages that fit into shared memory.

    stage_bytes: of one column in all operands.
    """
    columns = min(tile.columns, max(32, next_power_of_two(width)))
    stages = max(1, min(tile.stages, (shared - (4 << 10)) // (columns * stage_bytes)))
    return tile._replace(columns=columns, stages=stages)


def run(
    inputs: FusedMoEInputs,
    act_dtype: torch.dtype | None = None,
    dequantize: Callable[[FusedMoEInputs, str], FusedMoEInputs] | None = None,
) -> torch.Tensor:
    """Run the op: alignment, two grouped products and the sum over a token's experts.

    act_dtype: to which 8-bit dtype activations are quantized; None: they are not. dequantize: gives
    the inputs with "gate_up" or "down" in x's dtype, right before its product; None: they are
    multiplied as they are.
    """
    ids, dtype = inputs.topk_ids, inputs.x.dtype
    (tokens, hidden), top_k, experts = inputs.x.shape, ids.shape[1], len(inputs.gate_up)
    x, x_scale = quantize_rows_if_needed(inputs.x, act_dtype)
    inner_size = inputs.inner_size
    block = _tokens_per_tile(inputs)
    sorted_ids, expert_ids = moe_align_block_size.run(ids, block, experts)
    inner = torch.empty((len(sorted_ids), inner_size), dtype=dtype, device=x.device)
    by_pair = torch.empty((tokens * top_k, hidden), dtype=dtype, device=x.device)
    shared_bytes = max_shared_bytes(x.device)
    size = x.element_size() if dequantize else inputs.gate_up.element_size()
    first, second = LAUNCH_CONFIGS[block]
    if size == 1 and block == GATE_UP_LAUNCH_CONFIG_8BIT.tokens:
        first = GATE_UP_LAUNCH_CONFIG_8BIT
    x_size = x.element_size()
    first = _fit_launch_config(first, hidden, block * x_size + 2 * first.rows * size, shared_bytes)
    second = _fit_launch_config(
        second, inner_size, block * x_size + second.rows * size, shared_bytes
    )
    order = (sorted_ids, expert_ids)
    convert = dequantize or (lambda inputs, _: inputs)
    _launch_grouped_gemm(convert(inputs, "gate_up"), "gate_up", first, (x, x_scale), inner, order)
    scaled_inner = quantize_rows_if_needed(inner, act_dtype)
    _launch_grouped_gemm(convert(inputs, "down"), "down", second, scaled_inner, by_pair, order)
    return sum_expert_outputs(by_pair, inputs)


def _launch_grouped_gemm(
    inputs: FusedMoEInputs,
    name: str,
    tile: GroupedLaunchConfig,
    scaled_x: tuple[torch.Tensor, torch.Tensor | None],
    out: torch.Tensor,
    order: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """One grouped product, "gate_up" or "down"."""
    (x, x_scale), (sorted_ids, expert_ids) = scaled_x, order
    weight, scale, bias = (getattr(inputs, name + part) for part in ("", "_scale", "_bias"))
    (tokens, top_k), n, k = inputs.topk_ids.shape, out.shape[1], x.shape[1]
    pdl = pdl_launch_options(x.device, tokens)
    blocks, tiles = len(expert_ids), -(-n // tile.rows)
    fixed = (n, k, x.stride(0), weight.stride(0), weight.stride(1))
    _grouped_launcher(
        (blocks * tiles, 1, 1),
        (
            x, x if x_scale is None else x_scale, weight, x if scale is None else scale,
            x if bias is None else bias, sorted_ids, expert_ids, out,
        ),
        (blocks, tiles, tokens * top_k, *fixed), fixed,
        (
            top_k, name == "gate_up", x_scale is not None, scale is not None, bias is not None,
            *gate_constants(inputs), x.dtype == torch.int8, k % tile.columns == 0, GROUP,
            tile.tokens, tile.rows, tile.columns, pdl["PDL"],
        ),
        {
            "num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": pdl["launch_pdl"],
        },
    )  # fmt: skip


def sum_expert_outputs(by_pair: torch.Tensor, inputs: FusedMoEInputs) -> torch.Tensor:
    """The weighted sum [T, H] over the pairs of a token, plus the shared expert's output."""
    weights, shared, (tokens, hidden) = inputs.topk_weights, inputs.shared, inputs.x.shape
    out = torch.empty((tokens, hidden), dtype=by_pair.dtype, device=by_pair.device)
    pdl = pdl_launch_options(by_pair.device, tokens)
    block = min(1024, next_power_of_two(hidden))
    _sum_launcher(
        (-(-hidden // block), tokens, 1),
        (by_pair, inputs.topk_ids, weights, by_pair if shared is None else shared, out),
        (hidden,), (hidden,),
        (
            weights.shape[1], shared is not None, inputs.global_num_experts is not None, block,
            pdl["PDL"],
        ),
        {"num_warps": 4, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["blocks", "tiles", "pairs"])
def _grouped_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, sorted_ptr, experts_ptr, out_ptr,
    blocks, tiles, pairs, n, k, x_stride, expert_stride, stride,
    TOP_K: tl.constexpr, GATED: tl.constexpr, X_SCALE: tl.constexpr, SCALE: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    INT8: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # the first product of an expert without a gate has one matrix
    HAS_UP: tl.constexpr = GATED and GATE != _RELU2
    pdl_wait_and_trigger(PDL)
    block, tile, expert = tile_of_program(experts_ptr, blocks, tiles, GROUP)
    if expert >= 0:
        position, pair, source = load_block_pairs(sorted_ptr, block, pairs, TOP_K, GATED, BLOCK_M)
        row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        weight_row = tl.minimum(row, n - 1)
        column = tl.arange(0, BLOCK_K)
        x_at = x_ptr + source[None, :] * x_stride + column[:, None]
        weight_at = weight_ptr + expert * expert_stride
        weight_at += weight_row[:, None] * stride + column[None, :]
        up_at = weight_at + n.to(tl.int64) * stride
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.int32 if INT8 else tl.float32)
        ups = tl.zeros([BLOCK_N, BLOCK_M], tl.int32 if INT8 else tl.float32)
        for start in range(0, k, BLOCK_K):
            if EVEN:
                x = tl.load(x_at + start)
                w = tl.load(weight_at + start)
            else:
                inside = column < k - start
                x = tl.load(x_at + start, mask=inside[:, None], other=0.0)
                w = tl.load(weight_at + start, mask=inside[None, :], other=0.0)
            total = _multiply_add(w, x, total, X_SCALE, INT8)
            if HAS_UP:
                if EVEN:
                    u = tl.load(up_at + start)
                else:
                    u = tl.load(up_at + start, mask=inside[None, :], other=0.0)
                ups = _multiply_add(u, x, ups, X_SCALE, INT8)
        total = total.to(tl.float32)
        ups = ups.to(tl.float32)
        if SCALE:
            scale_at = scale_ptr + expert * (2 * n if HAS_UP else n) + weight_row
            total *= tl.load(scale_at)[:, None]
            if HAS_UP:
                ups *= tl.load(scale_at + n)[:, None]
        if X_SCALE:
            x_scale = tl.load(x_scale_ptr + source)[None, :]
            total *= x_scale
            ups *= x_scale
        if BIAS:
            total, ups = add_bias(bias_ptr, total, ups, expert, weight_row, n, HAS_UP)
        activate_and_store_tile(
            out_ptr, total, ups, position, pair, row, n, pairs, GATED, GATE, ALPHA, LIMIT
        )  # fmt: skip
    elif GATED and X_SCALE:  # numbers for what quantizes all rows
        position = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        target = out_ptr + position[None, :] * n + row[:, None]
        zeros = tl.zeros([BLOCK_N, BLOCK_M], out_ptr.dtype.element_ty)
        tl.store(target, zeros, mask=(row < n)[:, None])


@triton.jit
def _multiply_add(w, x, total, X_SCALE: tl.constexpr, INT8: tl.constexpr):
    """Total + w · x on tensor cores of x's dtype."""
    if INT8:
        return tl.dot(w, x, total, out_dtype=tl.int32)
    elif X_SCALE:  # noqa: RET505  Triton needs all branches
        # Hopper accumulates fp8 with few bits; after 128 columns the sum is added in float32
        COLUMNS: tl.constexpr = x.shape[0] if x.shape[0] < 128 else 128
        return tl.dot(w, x, total, max_num_imprecise_acc=COLUMNS)
    else:
        return tl.dot(w.to(x.dtype), x, total, input_precision="ieee")


@triton.jit
def tile_of_program(experts_ptr, blocks, tiles, GROUP: tl.constexpr):
    """(block of tokens, tile of the weight, expert): GROUP blocks take turns on each tile."""
    program = tl.program_id(0)
    first = program // (GROUP * tiles) * GROUP
    size = tl.minimum(blocks - first, GROUP)
    within = program % (GROUP * tiles)
    block = first + within % size
    return block, within // size, tl.load(experts_ptr + block).to(tl.int64)


@triton.jit
def load_block_pairs(
    sorted_ptr, block, pairs, TOP_K: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The positions of a block in the order by experts, their pairs, and the rows of their x."""
    position = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(sorted_ptr + position)
    # positions without a pair compute another one's values, which are not used
    source = tl.minimum(pair, pairs - 1).to(tl.int64) // TOP_K if GATED else position
    return position, pair, source


@triton.jit
def add_bias(bias_ptr, total, ups, expert, weight_row, n, GATED: tl.constexpr):
    """The products [N, M] with the biases of their rows."""
    bias_at = bias_ptr + expert * (2 * n if GATED else n) + weight_row
    total += tl.load(bias_at).to(tl.float32)[:, None]
    if GATED:
        ups += tl.load(bias_at + n).to(tl.float32)[:, None]
    return total, ups


@triton.jit
def activate_and_store_tile(
    out_ptr, total, ups, position, pair, row, n, pairs,
    GATED: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store a tile [N, M]: the gate of both products by position, or one product by pair."""
    element = out_ptr.dtype.element_ty
    if GATED:
        target = out_ptr + position[None, :] * n + row[:, None]
        gated = gated_activation(total, ups, element, GATE, ALPHA, LIMIT)
        tl.store(target, gated, mask=(row < n)[:, None])
    else:
        target = out_ptr + pair.to(tl.int64)[None, :] * n + row[:, None]
        mask = (row < n)[:, None] & (pair < pairs)[None, :]
        tl.store(target, total.to(element), mask=mask)


@triton.jit
def _sum_expert_outputs_kernel(
    pairs_ptr, ids_ptr, routing_ptr, shared_ptr, out_ptr, hidden,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, SKIPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    pdl_wait_and_trigger(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        there = inside
        if SKIPS:  # pairs without an expert here were not written
            there = column < tl.where(tl.load(ids_ptr + pair) >= 0, hidden, 0)
        value = tl.load(pairs_ptr + pair * hidden + column, mask=there, other=0.0)
        total += value.to(tl.float32) * tl.load(routing_ptr + pair)
    if SHARED:
        total += tl.load(shared_ptr + token * hidden + column, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=inside)


_grouped_launcher, _sum_launcher = (
    CachedLauncher(_grouped_kernel),
    CachedLauncher(_sum_expert_outputs_kernel),
)
