"""Products of a few rows with 4-bit weights through the tensor cores (int4_linear.cu).

Of one row they are wq_gemv.cu's, of up to 16 wq_gemm_small_m.cu's, of up to 128
wq_gemm_pipelined.cu's, of more wq_gemm_large_m.cu's; int4_linear.cu serves the rest. Up to 192 rows
of a weight that these do not serve are multiplied 64 at a time.
"""

from __future__ import annotations

import functools
import struct

import torch

from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.cuda.common import build, launch
from modelmill.ops.cuda.weight_only_gemm import wq_gemm_pipelined, wq_gemm_small_m, wq_gemv
from modelmill.ops.cuda.weight_only_gemm.weight_only import (
    DTYPE_DEFINES,
    K_TILE,
    PACK_COLUMNS,
    THREADS,
    WqMmaKernelConfig,
    config_for,
    fits_shared_memory,
    has_aligned_rows,
    k_tile_for,
    log2_k_tiles_per_group,
    mma_kernels,
    row_block_kernel,
    supports_bias,
)
from modelmill.ops.groupwise import GroupwiseLinearInputs
from modelmill.ops.int4_linear import DECLARATION
from modelmill.ops.kernel_support import GemmProblem, GemmSupportRange, Kernel


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    common = _kernel_macros(torch.bfloat16, config_for(1), K_TILE, offset=True, gated=False)
    return build.kernel_compile_failure_reason(device_type, "int4_linear", common)


def _fits_some_kernel(config: WqMmaKernelConfig, gated: bool, problem: GemmProblem) -> bool:
    """Whether groups divide a warp's pieces, and a block's scales find room in some kernel."""
    if (
        log2_k_tiles_per_group(problem.group, problem.k, k_tile_for(problem.group, problem.k))
        is None
    ):
        return False
    if fits_shared_memory(config, problem.groups):
        return True
    return (
        problem.m > wq_gemm_pipelined.MMA_MAX_ROWS
        and wq_gemm_pipelined.problem_split_k(problem, gated=gated) is not None
    )


def supported_problems(*, gated: bool) -> tuple[GemmSupportRange, ...]:
    """What the kernels serve: groups of 32, 64, 128, 256 … columns or of all, float16 scales.

    gated: with SwiGLU.
    """
    return wq_gemm_pipelined.supported_problems(_fits_some_kernel, (torch.float16,), gated=gated)


SUPPORTED_PROBLEMS = supported_problems(gated=False)


def supports(inputs: GroupwiseLinearInputs) -> bool:
    """Whether all are packed and aligned, scales and offsets in float16."""
    x, weight, scale, offset, _, bias = inputs
    grids = [t for t in (scale, offset) if t is not None]
    packed = (
        all(t.dtype == torch.float16 and t.is_contiguous() for t in grids)
        and weight.is_contiguous()
    )
    return packed and x.is_cuda and has_aligned_rows(x, weight) and supports_bias(bias, x.dtype)


def int4_mma_gemm(inputs: GroupwiseLinearInputs, *, gated: bool) -> torch.Tensor:
    """The output [T, N]; gated: silu(first half) · second half of it, [T, N / 2]."""
    x, weight, scale, offset, group, bias = inputs
    tokens, columns = x.shape
    rows = weight.shape[0]
    out = torch.empty((tokens, rows // 2 if gated else rows), dtype=x.dtype, device=x.device)
    form, piece = config_for(tokens), k_tile_for(group, columns)
    groups = scale.shape[1]
    with torch.cuda.device(x.device):
        macros = _kernel_macros(x.dtype, form, piece, offset=offset is not None, gated=gated)
        kernel = launch.compile_and_load_kernel(
            "int4_linear", "int4_linear", macros, THREADS, form.shared_bytes(groups), x.get_device()
        )
        pointers = launch.data_pointers(x, weight, scale, offset, bias, out)
        counts = (
            tokens,
            rows,
            columns // PACK_COLUMNS,
            x.stride(0),
            groups,
            log2_k_tiles_per_group(group, columns, piece),
        )
        kernel.launch(
            form.grid(rows, gated=gated), struct.pack("=6Q6i", *pointers, *counts), pdl=True
        )
    return out


def list_kernels_by_preference(*, gated: bool) -> tuple[Kernel, ...]:
    """The kernels of 4-bit GEMMs in order of preference; sums in float32."""
    few = (
        wq_gemv.make_gemv_kernel(gated=gated),
        *wq_gemm_small_m.list_kernels(gated=gated),
        *wq_gemm_pipelined.small_m_kernels(2, gated=gated),
        *mma_kernels(functools.partial(int4_mma_gemm, gated=gated)),
    )
    return (*few, *wq_gemm_pipelined.large_m_kernels(gated=gated), row_block_kernel(few))


def _kernel_macros(
    dtype: torch.dtype, config: WqMmaKernelConfig, k_tile: int, *, offset: bool, gated: bool
) -> tuple[str, ...]:
    if k_tile < K_TILE and config.m_tiles <= 2:  # as many bytes are on their way
        config = config._replace(prefetch_depth=2 * config.prefetch_depth)
    switches = (f"K_TILE={k_tile}", f"OFFSET={int(offset)}", f"GATED={int(gated)}", "SCALE_FP32=0")
    return (*config.macros, *switches, *DTYPE_DEFINES[dtype])


warmup_sizes = wq_gemm_pipelined.warmup_sizes
KERNELS = list_kernels_by_preference(gated=False)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
