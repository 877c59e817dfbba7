"""Matrix products for decoding: each weight is read once, at memory bandwidth.

Computes: out[M, N] = x[M, K] · weight[N, K]ᵀ (· scale) (+ bias[N]); linear_swiglu: silu(gate) · up
    of the two halves of N
Dtypes: x and out bfloat16, float16 or (M = 1) float32; weights of x's dtype, int8 or (fp8_linear)
    e4m3; float32 sums
Layout: row-major, contiguous rows
Range: M ≤ 16 (linear_swiglu: M ≤ 16, more rows by cuBLAS; int8_linear: M ≤ 192, more rows by
    cuBLAS; int8_linear_swiglu: M ≤ 16; fp8_linear: any M with 16-bit activations)
Technique: GEMV with whole weight rows in flight (M = 1), tensor cores with the weight as left
    operand, first weights before the wait (PDL)
Ops: linear, linear_swiglu, int8_linear, int8_linear_swiglu, fp8_linear

One row of x is a GEMV (``_gemv_kernel``): each program keeps a few whole weight rows in flight and
reduces once. Up to MAX_ROWS rows use tensor cores with the weight as the left operand
(``_gemm_kernel``): its 16 to 64 rows fill an instruction that the few rows of x would leave mostly
empty, and a weight that must be converted first (int8) comes from registers. More rows are computed
by cuBLAS, through the reference.

Weights do not depend on the previous kernel, so the first block is loaded while that one computes
(PDL).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.kernel_support import HALF_AND_FLOAT64_DTYPES, GemmSupportRange
from modelmill.ops.triton.common import launch_configs
from modelmill.ops.triton.common.device import INTERPRETED
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.dtype_convert import int8_to_float32
from modelmill.ops.triton.common.launch_configs import GemmKey, LaunchConfig, TunedConfigs
from modelmill.ops.triton.common.launch_configs import gemm_key as gemm_key
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

MAX_ROWS = 16


SUPPORTED_PROBLEMS = (
    GemmSupportRange(m=(1, 1)),
    GemmSupportRange(m=(2, MAX_ROWS), dtypes=HALF_AND_FLOAT64_DTYPES),
)


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Contiguous rows of x and weight, of one dtype."""
    return x.stride(1) == 1 and weight.stride(1) == 1 and x.dtype == weight.dtype


def candidates(key: GemmKey) -> tuple[LaunchConfig, ...]:
    """The launch configs that may be chosen for a product; none where cuBLAS is used."""
    return launch_configs.candidates(key, key[3].itemsize) if key[0] <= MAX_ROWS else ()


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    configs: TunedConfigs | None = None,
) -> torch.Tensor:
    """Run the op with float32 sums.

    configs: autotuned launch configs of this device; others are defaults.
    """
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    gemm(x, weight, None, bias, out, configs)
    return out


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    configs: TunedConfigs | None = None,
) -> None:
    """Compute out = x · weightᵀ (· scale) (+ bias), one row by the GEMV.

    x: [T, K]; weight: [N, K]; scale, bias: [N]. If out has N / 2 columns, it is silu(first half) ·
    second half. fp8 weights have no GEMV.
    """
    tokens, k = x.shape
    n = weight.shape[0]
    gated = out.shape[1] != n
    pointers = (x, weight, x if scale is None else scale, x if bias is None else bias, out)
    epilogue = {"GATED": gated, "SCALE": scale is not None, "BIAS": bias is not None}
    options = pdl_launch_options(x.device, tokens)
    if tokens == 1 and weight.dtype != torch.float8_e4m3fn:
        rows, block, warps = launch_configs.gemv_config(x, weight, configs, gated=gated)
        _gemv_kernel[(-(-n // rows),)](
            *pointers, n, k, weight.stride(0), **epilogue, ASSEMBLY=not INTERPRETED,
            EVEN=k % block == 0, ONCE=k <= block, BLOCK_N=rows, BLOCK_K=block, num_warps=warps,
            **options,
        )  # fmt: skip
        return
    block_t, block_n, block_k, stages, warps = launch_configs.gemm_config(x, weight, configs)
    _gemm_kernel[(-(-n // block_n), -(-tokens // block_t))](
        *pointers, tokens, n, k, x.stride(0), weight.stride(0), out.stride(0), **epilogue,
        EVEN=k % block_k == 0, AHEAD=tokens <= MAX_ROWS, BLOCK_T=block_t, BLOCK_N=block_n,
        BLOCK_K=block_k, num_stages=stages, num_warps=warps, **options,
    )  # fmt: skip


@triton.jit
def _gemv_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, n, k, stride,
    GATED: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, ASSEMBLY: tl.constexpr,
    EVEN: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, weight_row = _program_rows(tl.program_id(0), n, GATED, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    source = weight_ptr + weight_row.to(tl.int64)[:, None] * stride + column[None, :]
    # The weight is used once per step and must not evict activations from the cache. Its first
    # block is loaded before x may be read.
    if EVEN:
        w = tl.load(source, eviction_policy="evict_first")
    else:
        w = tl.load(source, mask=(column < k)[None, :], other=0.0, eviction_policy="evict_first")
    pdl_wait_and_trigger(PDL)
    if ONCE:
        total = _partial_products(w, x_ptr + column, column < k, SCALE and ASSEMBLY, EVEN)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
        for start in range(0, k, BLOCK_K):
            left = k - start
            next_w = tl.load(
                source + (start + BLOCK_K), mask=(column < left - BLOCK_K)[None, :], other=0.0,
                eviction_policy="evict_first",
            )  # fmt: skip
            total += _partial_products(
                w, x_ptr + start + column, column < left, SCALE and ASSEMBLY, EVEN
            )
            w = next_w
    out = tl.sum(total, axis=1)
    if SCALE:
        out *= tl.load(scale_ptr + weight_row)
    if BIAS:
        out += tl.load(bias_ptr + weight_row).to(tl.float32)
    out = out.to(out_ptr.dtype.element_ty)
    if GATED:
        tl.store(out_ptr + row, _swiglu(out[:, None]).reshape(row.shape), mask=row < n // 2)
    else:
        tl.store(out_ptr + row, out, mask=row < n)


@triton.jit
def _program_rows(program, n, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """(output rows, weight rows) of a program; if GATED, weight rows of the gate, then of up.

    Rows past the end repeat the last one: a load without a mask is faster, and their results are
    not stored.
    """
    i = tl.arange(0, BLOCK_N)
    if GATED:
        half: tl.constexpr = BLOCK_N // 2
        row = program * half + tl.arange(0, half)
        return row, tl.minimum(program * half + i % half, n // 2 - 1) + tl.where(
            i < half, 0, n // 2
        )
    else:  # noqa: RET505  Triton needs both branches
        row = program * BLOCK_N + i
        return row, tl.minimum(row, n - 1)


@triton.jit
def _swiglu(total):
    """Compute silu(gate) · up [N, T] of [2·N, T], gate above up, already rounded."""
    pair = tl.permute(tl.reshape(total, [2, total.shape[0] // 2, total.shape[1]]), (1, 2, 0))
    gate, up = tl.split(pair)
    gate32 = gate.to(tl.float32)
    return (gate32 / (1.0 + tl.exp(-gate32)) * up.to(tl.float32)).to(total.dtype)


@triton.jit
def _partial_products(w, x_ptr, inside, WIDEN: tl.constexpr, EVEN: tl.constexpr):
    """Products of w [N, K] and x [K], summed over eight columns held by one thread: [N, K / 8]."""
    if EVEN:
        x = tl.load(x_ptr)
    else:
        x = tl.load(x_ptr, mask=inside, other=0.0)
    if WIDEN:
        w32 = int8_to_float32(w)
    else:
        w32 = w.to(tl.float32)
    product = w32 * x.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(product, [w.shape[0], w.shape[1] // 8, 8]), axis=2)


@triton.jit(do_not_specialize=["tokens"])
def _gemm_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, tokens, n, k, x_stride, stride, out_stride,
    GATED: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row, weight_row = _program_rows(tl.program_id(0), n, GATED, BLOCK_N)
    weight_row = weight_row.to(tl.int64)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_K)
    weight_at = weight_ptr + weight_row[:, None] * stride + column[None, :]
    x_at = x_ptr + token.to(tl.int64)[None, :] * x_stride + column[:, None]
    # The first block is loaded before x may be read, and multiplied last, so that the loop does not
    # wait for it.
    if AHEAD:
        first_w = tl.load(weight_at, mask=(column < k)[None, :], other=0.0)
    pdl_wait_and_trigger(PDL)
    if AHEAD:
        first_x = tl.load(x_at, mask=(token < tokens)[None, :] & (column < k)[:, None], other=0.0)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(BLOCK_K if AHEAD else 0, k, BLOCK_K):
        if EVEN:
            w = tl.load(weight_at + start)
            x = tl.load(x_at + start, mask=(token < tokens)[None, :], other=0.0)
        else:
            inside = column < k - start
            w = tl.load(weight_at + start, mask=inside[None, :], other=0.0)
            x = tl.load(x_at + start, mask=(token < tokens)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(w.to(x.dtype), x, total, input_precision="ieee")
    if AHEAD:
        total = tl.dot(first_w.to(first_x.dtype), first_x, total, input_precision="ieee")
    if SCALE:
        total *= tl.load(scale_ptr + weight_row)[:, None]
    if BIAS:
        total += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    target = out_ptr + token.to(tl.int64)[None, :] * out_stride + row[:, None]
    total = total.to(out_ptr.dtype.element_ty)
    if GATED:
        tl.store(target, _swiglu(total), mask=(row < n // 2)[:, None] & (token < tokens)[None, :])
    else:
        tl.store(target, total, mask=(row < n)[:, None] & (token < tokens)[None, :])
