"""The experts of a few tokens: each program reads a few rows of the chosen experts' matrices.

Computes: inner[pair, I] = act(gate) · up, or act(up), of each pair of a token and its expert;
    out[M, H] = Σ topk_weights · (inner · downᵀ + bias) (+ shared)
Dtypes: x and out bfloat16, float16 or float32; weights of x's dtype, or int8 or e4m3 with a scale
    for each row, x and inner then also quantized to 8 bits; float32 sums
Layout: row-major; weights [E, N, K], the pairs of a token next to each other
Range: any M, meant for few; any I and H
Technique: GEMV with whole rows in flight, all experts of a token in one program (down), its first
    weights before griddepcontrol.wait, PDL
Used by: experts.py, grouped_gemm.py, grouped_gemm_int4.py, moe_decode_int4.py

Nothing but the weights of the chosen experts is read from memory, each once for every token that
has the expert. A token's experts are summed in one program in the order of its slots, without
atomics: the result does not depend on which program comes first.

The kernel of down starts while gate and up are computed. What it needs of them comes last: it reads
the experts of its token and its first weights before it waits. Experts may be read then because
gate and up let the next kernel start only after their own wait: whatever chose the experts has
ended. They are read past the L1 cache, which may hold older ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.fused_moe import GELU_TANH, RELU2, FusedMoEInputs
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.triton.common.device import next_power_of_two
from modelmill.ops.triton.common.dtype_convert import to_float32
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.norm_quantize import quantize

DecodeLaunchConfig = tuple[int, int, int]
CLAMPED_ACTIVATION = "clamped"  # the gate with a clamp, beside the names of activations
_CLAMPED, _GELU_TANH = tl.constexpr(CLAMPED_ACTIVATION), tl.constexpr(GELU_TANH)
_RELU2 = tl.constexpr(RELU2)
# (rows, columns, warps) of a program: of gate and of up each, and of down
DECODE_CONFIG_MAX_TOKENS = 4
GATE_UP_LAUNCH_CONFIG: DecodeLaunchConfig = (2, 2048, 4)
DOWN_LAUNCH_CONFIG: DecodeLaunchConfig = (4, 256, 4)
# more rows share the conversion of x: 8 bits are bound by instructions before bytes
GATE_UP_LAUNCH_CONFIG_8BIT: DecodeLaunchConfig = (4, 1024, 4)
DOWN_LAUNCH_CONFIG_8BIT: DecodeLaunchConfig = (4, 256, 8)
MANY_TOKENS_LAUNCH_CONFIG: DecodeLaunchConfig = (16, 128, 4)  # float32 alone comes here with many
# steps of down's loop over columns whose weights are loaded before the wait, and a thread's
# registers for them
MAX_PRELOAD_STEPS, MAX_PRELOAD_REGISTERS = 3, 48


def _choose_launch_config(tile: DecodeLaunchConfig, tokens: int, width: int) -> DecodeLaunchConfig:
    """The tile with fewer columns for a narrow matrix."""
    rows, columns, warps = tile if tokens <= DECODE_CONFIG_MAX_TOKENS else MANY_TOKENS_LAUNCH_CONFIG
    return rows, min(columns, max(16, next_power_of_two(width))), warps


def count_preload_steps(tile: DecodeLaunchConfig, slots: int, element_size: int, width: int) -> int:
    """Steps of down's loop over columns whose weights a program loads before it waits.

    Args:
        tile: of down.
        slots: a token's experts, rounded up to a power of two.
        element_size: bytes of an element of the tile.
        width: elements of a row.
    """
    rows, columns, warps = tile
    registers = max(1, rows * slots * columns * element_size // (4 * 32 * warps))
    return max(1, min(MAX_PRELOAD_STEPS, -(-width // columns), MAX_PRELOAD_REGISTERS // registers))


def quantize_rows_if_needed(
    x: torch.Tensor, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """X [M, K] in 8 bits with a scale for each row; as it is where ``dtype`` is None."""
    return (x, None) if dtype is None else quantize.run(x, ActQuantSpec(dtype))


def run(inputs: FusedMoEInputs, act_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Run the op with two launches, and one before each where activations are quantized.

    act_dtype: int8 or e4m3; None: the products take activations as they are.
    """
    ids, dtype = inputs.topk_ids, inputs.x.dtype
    (tokens, hidden), top_k = inputs.x.shape, ids.shape[1]
    inner_size = inputs.inner_size
    x, x_scale = quantize_rows_if_needed(inputs.x, act_dtype)
    inner = torch.empty((tokens * top_k, inner_size), dtype=dtype, device=x.device)
    out = torch.empty((tokens, hidden), dtype=dtype, device=x.device)
    pdl = pdl_launch_options(x.device, tokens, after_wait=True)
    gate_up, down = inputs.gate_up, inputs.down
    skips = inputs.global_num_experts is not None

    is_8bit = gate_up.element_size() == 1
    tile = GATE_UP_LAUNCH_CONFIG_8BIT if is_8bit else GATE_UP_LAUNCH_CONFIG
    rows, columns, warps = _choose_launch_config(tile, tokens, hidden)
    scale, bias = inputs.gate_up_scale, inputs.gate_up_bias
    blocks = -(-inner_size // rows)
    sizes = (inner_size, hidden, blocks, x.stride(0), gate_up.stride(0), gate_up.stride(1))
    _gate_up_launcher(
        (tokens * top_k * blocks, 1, 1),
        (
            x, x if x_scale is None else x_scale, gate_up, x if scale is None else scale,
            x if bias is None else bias, ids, inner,
        ),
        sizes, sizes,
        (
            top_k, x_scale is not None, scale is not None, bias is not None,
            skips, *gate_constants(inputs), hidden % columns == 0, rows, columns, pdl["PDL"],
        ),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip

    inner, inner_scale = quantize_rows_if_needed(inner, act_dtype)
    pdl = pdl_launch_options(x.device, tokens)
    tile = DOWN_LAUNCH_CONFIG_8BIT if is_8bit else DOWN_LAUNCH_CONFIG
    rows, columns, warps = _choose_launch_config(tile, tokens, inner_size)
    scale, bias, shared = inputs.down_scale, inputs.down_bias, inputs.shared
    down_sizes, slots = (
        (hidden, inner_size, down.stride(0), down.stride(1)),
        next_power_of_two(top_k),
    )
    _down_launcher(
        (-(-hidden // rows), tokens, 1),
        (
            inner, inner if inner_scale is None else inner_scale, down,
            inner if scale is None else scale, inner if bias is None else bias, ids,
            inputs.topk_weights, inner if shared is None else shared, out,
        ),
        down_sizes, down_sizes,
        (
            top_k, slots, inner_scale is not None, scale is not None,
            bias is not None, shared is not None, skips, inner_size % columns == 0, rows, columns,
            count_preload_steps((rows, columns, warps), slots, down.element_size(), inner_size),
            pdl["PDL"],
        ),
        {"num_warps": warps, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip
    return out


def gate_constants(inputs: FusedMoEInputs) -> tuple[str, float, float]:
    """GATE, ALPHA and LIMIT of ``gated_activation``."""
    return (
        (inputs.activation, 0.0, 0.0)
        if inputs.clamp is None
        else (CLAMPED_ACTIVATION, *inputs.clamp)
    )


@triton.jit
def _gate_up_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, ids_ptr, out_ptr,
    inner, k, blocks, x_stride, expert_stride, stride,
    TOP_K: tl.constexpr, X_SCALE: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr,
    SKIPS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HAS_UP: tl.constexpr = GATE != _RELU2
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end repeat the last one: a load without a mask is faster
    weight_row = tl.minimum(row, inner - 1)
    column = tl.arange(0, BLOCK_K)
    pdl_wait_and_trigger(PDL)
    expert, columns = load_pair_expert(ids_ptr, pair, k, SKIPS)
    gate_at = weight_ptr + expert * expert_stride + weight_row[:, None] * stride + column[None, :]
    up_at = gate_at + inner.to(tl.int64) * stride
    x_ptr += pair // TOP_K * x_stride
    gates = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for start in range(0, columns, BLOCK_K):
        if EVEN:
            g = tl.load(gate_at + start, eviction_policy="evict_first")
            if HAS_UP:
                u = tl.load(up_at + start, eviction_policy="evict_first")
            x = tl.load(x_ptr + start + column)
        else:
            inside = column < k - start
            g = tl.load(gate_at + start, mask=inside[None, :], other=0.0)
            if HAS_UP:
                u = tl.load(up_at + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_ptr + start + column, mask=inside, other=0.0)
        x32 = x.to(tl.float32)[None, :]
        gates += _sum_runs_of_8(to_float32(g) * x32)
        if HAS_UP:
            ups += _sum_runs_of_8(to_float32(u) * x32)
    gate = tl.sum(gates, axis=1)
    up = tl.sum(ups, axis=1)
    if SCALE:
        scale_at = scale_ptr + expert * (2 * inner if HAS_UP else inner) + weight_row
        gate *= tl.load(scale_at)
        if HAS_UP:
            up *= tl.load(scale_at + inner)
    if X_SCALE:
        x_scale = tl.load(x_scale_ptr + pair // TOP_K)
        gate *= x_scale
        up *= x_scale
    activate_and_store(
        out_ptr, bias_ptr, gate, up, expert, pair, row, weight_row, inner, BIAS, GATE, ALPHA, LIMIT
    )


@triton.jit
def load_pair_expert(ids_ptr, pair, k, SKIPS: tl.constexpr):
    """A pair's expert, and how many columns of its weights to read.

    Of an expert of another rank none are read, and the values that follow are not used.
    """
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if SKIPS:
        return tl.maximum(expert, 0), tl.where(expert >= 0, k, 0)
    else:  # noqa: RET505  Triton needs both branches
        return expert, k


@triton.jit
def activate_and_store(
    out_ptr, bias_ptr, gate, up, expert, pair, row, weight_row, inner,
    BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store what a pair's expert makes of gate and up [N], at the rows that exist."""
    if BIAS:
        HAS_UP: tl.constexpr = GATE != _RELU2
        bias_at = bias_ptr + expert * (2 * inner if HAS_UP else inner) + weight_row
        gate += tl.load(bias_at).to(tl.float32)
        if HAS_UP:
            up += tl.load(bias_at + inner).to(tl.float32)
    out = gated_activation(gate, up, out_ptr.dtype.element_ty, GATE, ALPHA, LIMIT)
    tl.store(out_ptr + pair * inner + row, out, mask=row < inner)


@triton.jit
def _down_kernel(
    inner_ptr, inner_scale_ptr, weight_ptr, scale_ptr, bias_ptr, ids_ptr, routing_ptr, shared_ptr,
    out_ptr, n, k, expert_stride, stride,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, X_SCALE: tl.constexpr, SCALE: tl.constexpr,
    BIAS: tl.constexpr, SHARED: tl.constexpr, SKIPS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ALL: tl.constexpr = EVEN and SLOTS == TOP_K and not SKIPS
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(row, n - 1)
    column = tl.arange(0, BLOCK_K)
    token = tl.program_id(1).to(tl.int64)
    pair, live, expert, routing = load_token_experts(
        ids_ptr, routing_ptr, token, TOP_K, SLOTS, SKIPS
    )
    weight_at = weight_ptr + weight_row[:, None, None] * stride + column[None, None, :]
    weight_at += (expert * expert_stride)[None, :, None]
    inner_at = inner_ptr + pair[:, None] * k + column[None, :]
    first = _load_down_tile(weight_at, live, column, 0, k, ALL)
    if EARLY > 1:
        second = _load_down_tile(weight_at, live, column, BLOCK_K, k, ALL)
    if EARLY > 2:
        third = _load_down_tile(weight_at, live, column, 2 * BLOCK_K, k, ALL)
    pdl_wait_and_trigger(PDL)
    total = _down_products(first, inner_at, live, column, 0, k, ALL)
    if EARLY > 1:
        total += _down_products(second, inner_at, live, column, BLOCK_K, k, ALL)
    if EARLY > 2:
        total += _down_products(third, inner_at, live, column, 2 * BLOCK_K, k, ALL)
    for start in range(EARLY * BLOCK_K, k, BLOCK_K):
        weights = _load_down_tile(weight_at, live, column, start, k, ALL)
        total += _down_products(weights, inner_at, live, column, start, k, ALL)
    out = tl.sum(total, axis=2)
    if SCALE:
        out *= tl.load(scale_ptr + (expert * n)[None, :] + weight_row[:, None])
    if X_SCALE:
        out *= tl.load(inner_scale_ptr + pair, mask=live, other=0.0)[None, :]
    if BIAS:
        out += tl.load(bias_ptr + (expert * n)[None, :] + weight_row[:, None]).to(tl.float32)
    store_weighted_sum(out_ptr, shared_ptr, out, routing, token, row, n, SHARED)


@triton.jit
def _load_down_tile(weight_at, live, column, start, k, ALL: tl.constexpr):
    """Weights [N, SLOTS, K] from column ``start`` on. ALL: every slot and column exists."""
    if ALL:
        return tl.load(weight_at + start, eviction_policy="evict_first")
    there = live[:, None] & (column < k - start)[None, :]
    return tl.load(weight_at + start, mask=there[None, :, :], other=0.0)


@triton.jit
def _down_products(weights, inner_at, live, column, start, k, ALL: tl.constexpr):
    """Products [N, SLOTS, K / 8] with columns of inner, summed by the eight that a thread holds."""
    if ALL:
        x = tl.load(inner_at + start)
    else:
        x = tl.load(inner_at + start, mask=live[:, None] & (column < k - start)[None, :], other=0.0)
    product = to_float32(weights) * x.to(tl.float32)[None, :, :]
    return tl.sum(
        tl.reshape(product, [product.shape[0], product.shape[1], product.shape[2] // 8, 8]), axis=3
    )


@triton.jit
def load_token_experts(
    ids_ptr, routing_ptr, token, TOP_K: tl.constexpr, SLOTS: tl.constexpr, SKIPS: tl.constexpr
):
    """A token's pairs [SLOTS], which of them exist here, their experts and their weights.

    Before the wait, and so from L2.
    """
    slot = tl.arange(0, SLOTS)
    live = slot < TOP_K
    pair = token * TOP_K + slot
    expert = tl.load(ids_ptr + pair, mask=live, other=0, cache_modifier=".cg").to(tl.int64)
    if SKIPS:
        live = live & (expert >= 0)
        expert = tl.maximum(expert, 0)
    routing = tl.load(routing_ptr + pair, mask=live, other=0.0, cache_modifier=".cg")
    return pair, live, expert, routing


@triton.jit
def store_weighted_sum(out_ptr, shared_ptr, out, routing, token, row, n, SHARED: tl.constexpr):
    """Store rows of a token's weighted sum of out [N, SLOTS], rounded before it, plus shared."""
    element = out_ptr.dtype.element_ty
    total = tl.sum(out.to(element).to(tl.float32) * routing[None, :], axis=1)
    if SHARED:
        total += tl.load(shared_ptr + token * n + tl.minimum(row, n - 1)).to(tl.float32)
    tl.store(out_ptr + token * n + row, total.to(element), mask=row < n)


@triton.jit
def _sum_runs_of_8(product):
    """[N, K] → [N, K / 8]: the columns that one thread holds."""
    return tl.sum(tl.reshape(product, [product.shape[0], product.shape[1] // 8, 8]), axis=2)


@triton.jit
def gated_activation(
    gate, up, element: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
):
    """act(gate) · up of float32 values that are rounded to a dtype first, in that dtype.

    Without a gate the first product is ``gate`` here, and there is no ``up``.
    """
    gate = gate.to(element).to(tl.float32)
    if GATE == _RELU2:
        positive = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return (positive * positive).to(element)
    up = up.to(element).to(tl.float32)
    exponent = gate
    if GATE == _CLAMPED:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1.0
        exponent = ALPHA * gate
    elif GATE == _GELU_TANH:  # (1 + tanh(y)) / 2 is the sigmoid of 2y
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-exponent)) * up).to(element)


_gate_up_launcher, _down_launcher = CachedLauncher(_gate_up_kernel), CachedLauncher(_down_kernel)
