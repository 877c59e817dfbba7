"""Products of 8-bit activations and 8-bit weights: int8 with integer sums, fp8 with float32 sums.

Computes: out[M, N] = (x[M, K] · weight[N, K]ᵀ) · x_scale · scale (+ bias[N])
Dtypes: x and weight int8 (int32 sums) or e4m3 (float32 sums); out bfloat16, float16 or float32
Layout: row-major, contiguous rows; float32 scales [N] and [M] or [1]
Range: any M (fp8_linear: 8-bit activations, M ≤ 255 where torch has a row-scaled product for more
    rows)
Technique: dp4a GEMV (M = 1), tensor cores with the weight as left operand, autotuned launch
    configs, PDL
Ops: w8a8_linear, fp8_linear

One token: ``_gemv_8bit_kernel`` keeps a few whole weight rows in flight, as words of four values;
four int8 products are one instruction (dp4a). It uses no tensor cores. Otherwise
``_gemm_8bit_kernel`` uses tensor cores with the weight as the left operand, whose rows fill an
instruction that a few tokens would leave mostly empty. Scales and bias are applied once, in
float32, before the single rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.common import launch_configs
from modelmill.ops.triton.common.device import INTERPRETED, max_shared_bytes, next_power_of_two
from modelmill.ops.triton.common.launch_configs import LaunchConfig, TunedConfigs
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.w8a8_linear import Linear8BitInputs

# tokens up to which a block of weights is loaded before x is available
PREFETCH_MAX_ROWS = 16


def gemm_8bit(inputs: Linear8BitInputs, configs: TunedConfigs | None = None) -> torch.Tensor:
    """Compute (x · weightᵀ) · x_scale · scale (+ bias) of x in 8 bits.

    Returns:
        [T, N] of ``dtype``.
    """
    x, weight = inputs.x, inputs.weight
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=inputs.dtype, device=x.device)
    launch = _launch_gemv if can_use_gemv(x, weight) else _launch_gemm
    launch(inputs, out, configs)
    return out


def _launch_gemm(inputs: Linear8BitInputs, out: torch.Tensor, configs: TunedConfigs | None) -> None:
    x, weight, scale, x_scale, _, bias = inputs
    assert x_scale is not None, "8-bit activations have a scale"
    tokens, k = x.shape
    n = weight.shape[0]
    picked = None if configs is None else configs.get(launch_configs.gemm_key(x, weight))
    block_t, block_n, block_k, stages, warps = launch_configs.fit_stages(
        picked or _launch_config(tokens, n), x, weight, max_shared_bytes(x.device)
    )
    # neighbouring programs share a block of the weight, which is read once from memory; activations
    # stay in the cache
    blocks = -(-tokens // block_t)
    _gemm_8bit_kernel[(-(-n // block_n) * blocks,)](
        x, weight, scale, x_scale, x if bias is None else bias, out,
        tokens, n, k, x.stride(0), weight.stride(0), out.stride(0), blocks,
        BIAS=bias is not None, PER_TOKEN=x_scale.numel() > 1, IS_INT8=x.dtype == torch.int8,
        PREFETCH=tokens <= PREFETCH_MAX_ROWS,
        BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k,
        num_stages=stages, num_warps=warps, **pdl_launch_options(x.device, tokens),
    )  # fmt: skip


def _launch_config(tokens: int, n: int) -> LaunchConfig:
    if tokens <= 8:
        return (8, 64, 128, 4, 4) if n > 8192 else (8, 32, 256, 4, 4)
    if tokens <= 16:
        return (16, 64, 256, 3, 4) if n > 8192 else (16, 32, 256, 4, 4)
    if tokens <= 64:
        return (32, 64, 128, 4, 4) if tokens <= 32 else (64, 64, 128, 4, 4)
    return 128, 128, 128, 4, 8


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _gemm_8bit_kernel(
    x_ptr, weight_ptr, scale_ptr, x_scale_ptr, bias_ptr, out_ptr,
    tokens, n, k, x_stride, stride, out_stride, blocks,
    BIAS: tl.constexpr, PER_TOKEN: tl.constexpr, IS_INT8: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (program % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_K)
    # rows past the end repeat the last one; their results are not stored
    weight_row = tl.minimum(row, n - 1).to(tl.int64)
    token_row = tl.minimum(token, tokens - 1).to(tl.int64)
    weight_at = weight_ptr + weight_row[:, None] * stride + column[None, :]
    x_at = x_ptr + token_row[None, :] * x_stride + column[:, None]
    # The first block is loaded before x may be read, and multiplied last, so that the loop does not
    # wait for it.
    if PREFETCH:
        first = tl.load(weight_at, mask=(column < k)[None, :], other=0 if IS_INT8 else 0.0)
    pdl_wait_and_trigger(PDL)
    if PREFETCH:
        first_x = tl.load(x_at, mask=(column < k)[:, None], other=0 if IS_INT8 else 0.0)
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.int32 if IS_INT8 else tl.float32)
    for start in range(BLOCK_K if PREFETCH else 0, k, BLOCK_K):
        inside = column < k - start
        w = tl.load(weight_at + start, mask=inside[None, :], other=0 if IS_INT8 else 0.0)
        x = tl.load(x_at + start, mask=inside[:, None], other=0 if IS_INT8 else 0.0)
        total = _multiply_add(w, x, total, IS_INT8)
    if PREFETCH:
        total = _multiply_add(first, first_x, total, IS_INT8)
    out = total.to(tl.float32)
    if PER_TOKEN:
        out *= tl.load(x_scale_ptr + token_row)[None, :]
    else:
        out *= tl.load(x_scale_ptr)
    out *= tl.load(scale_ptr + weight_row)[:, None]
    if BIAS:
        out += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    target = out_ptr + token.to(tl.int64)[None, :] * out_stride + row[:, None]
    live = (row < n)[:, None] & (token < tokens)[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _multiply_add(w, x, total, IS_INT8: tl.constexpr):
    if IS_INT8:
        return tl.dot(w, x, total, out_dtype=tl.int32)
    else:  # noqa: RET505  Triton compiles code after a return too
        # Hopper accumulates fp8 with few bits; every 128 columns the sum is added in float32
        return tl.dot(w, x, total, max_num_imprecise_acc=128)


def can_use_gemv(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether rows are whole aligned 32-bit words of four values, as the GEMV requires."""
    return (
        x.shape[1] % 4 == 0
        and x.shape[0] == 1
        and weight.is_contiguous()
        and x.data_ptr() % 4 == 0
        and weight.data_ptr() % 4 == 0
    )


def _launch_gemv(inputs: Linear8BitInputs, out: torch.Tensor, configs: TunedConfigs | None) -> None:
    """For x [1, K], if ``can_use_gemv``."""
    x, weight, scale, x_scale, _, bias = inputs
    n, k = weight.shape[0], weight.shape[1] // 4
    is_int8 = x.dtype is torch.int8
    picked = None if configs is None else configs.get(launch_configs.gemm_key(x, weight))
    rows, block, warps = picked or gemv_8bit_config(n, weight.shape[1], is_int8)
    block = min(block, next_power_of_two(max(k, 8)))
    _gemv_8bit_kernel[(-(-n // rows),)](
        x.view(torch.int32), weight.view(torch.int32), scale, x_scale, x if bias is None else bias,
        out, n, k,
        BIAS=bias is not None, IS_INT8=is_int8, ASSEMBLY=not INTERPRETED, EVEN=k % block == 0,
        ONCE=k <= block,
        BLOCK_N=rows, BLOCK_K=block, num_warps=max(1, min(warps, rows * block // 32)),
        **pdl_launch_options(x.device, 1),
    )  # fmt: skip


def gemv_8bit_config(n: int, k: int, is_int8: bool) -> LaunchConfig:
    """(weight rows per program, words per block, warps) for one token, measured on an H200."""
    if n < 512:  # too few rows for several per program
        return 1, 512, 4
    return (4, 1024, 4) if is_int8 and k <= 4096 else (2, 512, 2)


@triton.jit
def _gemv_8bit_kernel(
    x_ptr, weight_ptr, scale_ptr, x_scale_ptr, bias_ptr, out_ptr, n, k,
    BIAS: tl.constexpr, IS_INT8: tl.constexpr, ASSEMBLY: tl.constexpr, EVEN: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(row, n - 1)
    column = tl.arange(0, BLOCK_K)
    source = weight_ptr + weight_row.to(tl.int64)[:, None] * k + column[None, :]
    # The weight is used once per step; its first block and its scales are loaded before x may be
    # read.
    w = _load_streaming(source, column < k, EVEN)
    scale = tl.load(scale_ptr + weight_row)
    pdl_wait_and_trigger(PDL)
    if ONCE:
        total = _partial_products(w, x_ptr + column, column < k, IS_INT8, ASSEMBLY, EVEN)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.int32 if IS_INT8 else tl.float32)
        for start in range(0, k, BLOCK_K):
            next_w = _load_streaming(
                source + (start + BLOCK_K), column < k - start - BLOCK_K, False
            )
            total += _partial_products(
                w, x_ptr + start + column, column < k - start, IS_INT8, ASSEMBLY, EVEN
            )
            w = next_w
    out = tl.sum(total, axis=1).to(tl.float32) * tl.load(x_scale_ptr) * scale
    if BIAS:
        out += tl.load(bias_ptr + weight_row).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=row < n)


@triton.jit
def _load_streaming(source, inside, EVEN: tl.constexpr):
    """Load weights that no other program reads."""
    if EVEN:
        return tl.load(source, eviction_policy="evict_first")
    else:  # noqa: RET505  Triton compiles code after a return too
        return tl.load(source, mask=inside[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _partial_products(
    w, x_ptr, inside, IS_INT8: tl.constexpr, ASSEMBLY: tl.constexpr, EVEN: tl.constexpr
):
    """Products of w [N, K] and x [K], words of four values: [N, K / 8].

    The products of eight neighbouring words, which one thread holds, are added.
    """
    if EVEN:
        x = tl.load(x_ptr)
    else:
        x = tl.load(x_ptr, mask=inside, other=0)
    if IS_INT8:
        products = _dot_int8_words(w, tl.broadcast_to(x[None, :], w.shape), ASSEMBLY)
    elif ASSEMBLY:
        first, second = _fp8_to_float16_eighths(x)
        first, second = (
            tl.broadcast_to(first[None, :], w.shape),
            tl.broadcast_to(second[None, :], w.shape),
        )
        products = _dot_fp8_words(w, first, second)
    else:
        products = _dot_fp8_bytes(w, tl.broadcast_to(x[None, :], w.shape))
    return tl.sum(tl.reshape(products, [w.shape[0], w.shape[1] // 8, 8]), axis=2)


@triton.jit
def _dot_int8_words(w, x, ASSEMBLY: tl.constexpr):
    """Sum of the products of the four bytes of each int32."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;",
            "=r,r,r",
            args=[w, x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:  # noqa: RET505
        total = tl.zeros(w.shape, tl.int32)
        for byte in tl.static_range(4):
            total += ((w << (24 - 8 * byte)) >> 24) * ((x << (24 - 8 * byte)) >> 24)
        return total


@triton.jit
def _fp8_to_float16_eighths(x):
    """Convert the four fp8 of each int32 to two pairs of float16, divided by eight.

    Sums of two products then fit into float16.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 a, b;
        .reg .b32 c;
        mov.b32 {a, b}, $2;
        mov.b32 c, 0x30003000;
        cvt.rn.f16x2.e4m3x2 $0, a;
        cvt.rn.f16x2.e4m3x2 $1, b;
        mul.rn.f16x2 $0, $0, c;
        mul.rn.f16x2 $1, $1, c;
        }""",
        "=r,=r,r",
        args=[x],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _dot_fp8_words(w, first, second):
    """Sum of the products of the four fp8 of each int32 with ``_fp8_to_float16_eighths``.

    A product has 8 bits and is exact in float16; a sum of two keeps 11 bits. All else is added in
    float32.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 a, b;
        .reg .b32 p, r;
        .reg .f32 x, y;
        mov.b32 {a, b}, $1;
        cvt.rn.f16x2.e4m3x2 p, a;
        cvt.rn.f16x2.e4m3x2 r, b;
        mul.rn.f16x2 p, p, $2;
        fma.rn.f16x2 p, r, $3, p;
        mov.b32 {a, b}, p;
        cvt.f32.f16 x, a;
        cvt.f32.f16 y, b;
        add.f32 x, x, y;
        mul.f32 $0, x, 0f41000000;
        }""",
        "=f,r,r,r",
        args=[w, first, second],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _dot_fp8_bytes(w, x):
    """The same for the interpreter."""
    total = tl.zeros(w.shape, tl.float32)
    for byte in tl.static_range(4):
        a = ((w >> (8 * byte)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        b = ((x >> (8 * byte)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        total += a * b
    return total
