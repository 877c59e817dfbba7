"""W8A8 GEMM for many rows with scales in the epilogue (gemm_8bit.cu)."""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch

from modelmill.ops.cuda.common import build, launch
from modelmill.ops.kernel_support import GemmSupportRange
from modelmill.ops.w8a8_linear import Linear8BitInputs

INPUT_MACROS = {torch.int8: (), torch.float8_e4m3fn: ("FP8",)}
OUTPUT_MACROS = {torch.bfloat16: (), torch.float16: ("HALF",), torch.float32: ("OUT_FP32",)}
# Sizes of gemm_8bit.cu.
THREADS = 384
K_SLAB = 128
BARRIER_BYTES = 16
MAX_SHARED_BYTES = 227 << 10
Gemm8BitKernelConfig = tuple[int, int, int]  # MT, BN, PINGPONG
# A tile's rows of x and of w, and what an SM makes of it beside the largest (measured on
# an H200).
KERNEL_CONFIGS: dict[Gemm8BitKernelConfig, tuple[int, int, float]] = {
    (1, 256, 0): (128, 256, 1.0),
    (2, 128, 1): (128, 128, 0.97),
    (1, 192, 0): (128, 192, 0.92),
    (1, 128, 1): (64, 128, 0.785),
    (1, 64, 1): (64, 64, 0.457),
    (1, 32, 1): (64, 32, 0.305),
}
# by whether there is a bias, and a gate
_EPILOGUE_MACROS = {
    (False, False): (),
    (True, False): ("BIAS=1",),
    (False, True): ("GATED=1",),
    (True, True): ("BIAS=1", "GATED=1"),
}


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    return build.kernel_compile_failure_reason(
        device_type, "gemm_8bit", kernel_macros((1, 256, 0), torch.int8, torch.bfloat16)
    )


def gemm_support_range(
    m: tuple[int, int],
    *,
    out_dtypes: tuple[torch.dtype, ...] = tuple(OUTPUT_MACROS),
    **more: Any,
) -> GemmSupportRange:
    """Products of so many rows that the kernel serves; ``more``: other fields of the range."""
    return GemmSupportRange(
        m=m,
        **{"n_multiple": 8} | more,
        k_multiple=16,
        dtypes=tuple(INPUT_MACROS),
        out_dtypes=out_dtypes,
        scale_dtypes=(torch.float32,),
    )


def supports(inputs: Linear8BitInputs) -> bool:
    """Whether the operands are as the kernel reads them.

    x [T, K] and weight [N, K] of one 8-bit type and packed; bias of the output type.
    """
    x, weight, scale, x_scale, dtype, bias = inputs
    if weight.dtype != x.dtype or not x.is_cuda or not x.shape[1]:
        return False
    if x_scale is None or x_scale.dtype != torch.float32:
        return False
    if not all(each.is_contiguous() for each in (x, weight, scale, x_scale)):
        return False
    if bias is not None and not (
        bias.dtype == dtype and bias.is_contiguous() and bias.data_ptr() % 8 == 0
    ):
        return False
    return x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0


def run(
    inputs: Linear8BitInputs, *, gated: bool = False, config: Gemm8BitKernelConfig | None = None
) -> torch.Tensor:
    """(x · weightᵀ) · x_scale · scale (+ bias), [T, N] of ``dtype``; x_scale [T] or [1].

    gated: silu(first half) · second half of that, [T, N / 2]; N is a multiple of 16.
    """
    x, weight, scale, x_scale, dtype, bias = inputs
    assert x_scale is not None, "see supports"
    (tokens, k), n = x.shape, weight.shape[0]
    device = x.get_device()
    out = torch.empty((tokens, n // 2 if gated else n), dtype=dtype, device=x.device)
    config = config or best_config(tokens, n, launch.sm_count(device), gated)
    down, across, _ = KERNEL_CONFIGS[config]
    pointers = (
        scale.data_ptr(),
        x_scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
    )
    work = struct.pack("=4Q4i", *pointers, tokens, n, -(-k // K_SLAB), x_scale.numel() > 1)
    maps = (
        _byte_tensor_map(x.data_ptr(), tokens, k, down),
        _byte_tensor_map(weight.data_ptr(), n, k, across >> gated),
    )
    blocks = _count_blocks(config, tokens, n, device)
    if device == torch.cuda.current_device():
        _load_kernel(config, x.dtype, dtype, bias is not None, gated, device).launch(
            blocks, *maps, work, pdl=True
        )
    else:
        with torch.cuda.device(device):
            _load_kernel(config, x.dtype, dtype, bias is not None, gated, device).launch(
                blocks, *maps, work, pdl=True
            )
    return out


@functools.cache
def _load_kernel(
    config: Gemm8BitKernelConfig,
    in_dtype: torch.dtype,
    dtype: torch.dtype,
    biased: bool,
    gated: bool,
    device: int,
) -> launch.CudaKernel:
    epilogue_macros = _EPILOGUE_MACROS[biased, gated]
    return launch.compile_and_load_kernel(
        "gemm_8bit",
        "gemm_8bit",
        kernel_macros(config, in_dtype, dtype, epilogue_macros),
        THREADS,
        _shared_bytes(config),
        device,
    )


@functools.lru_cache(4096)
def _count_blocks(config: Gemm8BitKernelConfig, tokens: int, n: int, device: int) -> int:
    return min(_count_tiles(config, tokens, n), launch.sm_count(device))


@functools.lru_cache(4096)
def best_config(tokens: int, n: int, num_sms: int, gated: bool = False) -> Gemm8BitKernelConfig:
    """The config with the shortest estimated time; with ``gated`` only tiles of 64 rows or more."""

    def cost(form: Gemm8BitKernelConfig) -> float:
        down, across, rate = KERNEL_CONFIGS[form]
        return -(-_count_tiles(form, tokens, n) // num_sms) * down * across / rate

    return min((form for form in KERNEL_CONFIGS if not gated or form[1] >= 64), key=cost)


def warmup_row_counts(
    n: int, num_sms: int, small_m_limit: int, max_rows: int, gated: bool = False
) -> list[int]:
    """Numbers of rows in (``small_m_limit``, ``max_rows``], one per config chosen for N = n."""
    rows_by_config: dict[Gemm8BitKernelConfig, int] = {}
    for rows in dict.fromkeys((small_m_limit + 1, *range(64, max_rows + 1, 64), max_rows)):
        if small_m_limit < rows <= max_rows:
            rows_by_config.setdefault(best_config(rows, n, num_sms, gated), rows)
    return list(rows_by_config.values())


def warmup_sizes(
    x: torch.Tensor, weight: torch.Tensor, small_m_limit: int, max_rows: int, gated: bool = False
) -> list[int]:
    """``warmup_row_counts`` for x's kind and place; none where the kernel does not read x."""
    if x.dtype not in INPUT_MACROS:
        return []
    return warmup_row_counts(
        weight.shape[0], launch.sm_count(x.get_device()), small_m_limit, max_rows, gated
    )


def _count_tiles(config: Gemm8BitKernelConfig, tokens: int, n: int) -> int:
    down, across, _ = KERNEL_CONFIGS[config]
    return -(-tokens // down) * -(-n // across)


def kernel_macros(
    config: Gemm8BitKernelConfig,
    in_dtype: torch.dtype,
    dtype: torch.dtype,
    extra_macros: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Macros for inputs of ``in_dtype`` and outputs of ``dtype``.

    extra_macros: BIAS=1, GATED=1.
    """
    mt, bn, turns = config
    sizes = (f"MT={mt}", f"BN={bn}", f"PINGPONG={turns}")
    return (
        *sizes,
        f"STAGES={_count_stages(config)}",
        *INPUT_MACROS[in_dtype],
        *OUTPUT_MACROS[dtype],
        *extra_macros,
    )


def _count_stages(config: Gemm8BitKernelConfig) -> int:
    down, across, _ = KERNEL_CONFIGS[config]
    return min(16, MAX_SHARED_BYTES // (K_SLAB * (down + across) + BARRIER_BYTES))


def _shared_bytes(config: Gemm8BitKernelConfig) -> int:
    down, across, _ = KERNEL_CONFIGS[config]
    return _count_stages(config) * (K_SLAB * (down + across) + BARRIER_BYTES)


@functools.lru_cache(4096)
def _byte_tensor_map(address: int, rows: int, columns: int, box: int) -> bytes:
    """Tensor map of a byte matrix with boxes of 128 columns by ``box`` rows."""
    return launch.tensor_map(address, torch.uint8, (columns, rows), (columns,), (K_SLAB, box))
