"""Fused QKV projection, RoPE and KV-cache write for prompts (qkv_rope_cache.cu)."""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda.common import build, launch
from modelmill.ops.cuda.gemm_16bit import gemm
from modelmill.ops.cuda.gemm_16bit.gemm import (
    DTYPE_DEFINES,
    LARGE_M_THREADS,
    LARGE_M_TILE_ROWS,
    supports_operands,
)
from modelmill.ops.kernel_support import HALF_DTYPES, UNBOUNDED, GemmProblem, GemmSupportRange
from modelmill.ops.rope_cache import RopeCacheInputs

TILE_WIDTH = 256  # rows of the weight of a tile
HEAD_DIMS = (64, 128)
# measured: at 0.97 4 to 14 % faster than cuBLAS and the rotation, at 0.91 as fast, at 0.87 slower
MIN_TILE_EFFICIENCY = 0.93
_MAX_ELEMENTS = 1 << 31  # slots, and values of the projection: they are counted in 32 bits


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles one config (cached on disk).
    """
    return build.kernel_compile_failure_reason(
        device_type, "qkv_rope_cache", kernel_macros(128, biased=True, dtype=torch.bfloat16)
    )


def kernel_macros(dim: int, *, biased: bool, dtype: torch.dtype) -> tuple[str, ...]:
    """Macros for the compiler."""
    return (
        f"DIM={dim}",
        f"BIAS={int(biased)}",
        f"BAND={gemm.TILES_PER_BAND}",
        *DTYPE_DEFINES[dtype],
    )


def supports(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, inputs: RopeCacheInputs
) -> bool:
    """Whether the kernel serves these operands.

    16 bits, also of the pages, which have 2^n tokens each; heads of 64 or 128 without q/k
    norms.
    """
    if not supports_operands(x, weight, bias):
        return False
    k_cache, v_cache, slots, heads, cos, sin, q_scale, q_norm, k_norm = inputs[:9]
    k_scale, v_scale = inputs[10:]
    if any(each is not None for each in (q_norm, k_norm, k_scale, v_scale)) or (cos is None) != (
        sin is None
    ):
        return False
    dim, rows = k_cache.shape[3], (x.shape[0],)
    angles = _is_none_or_contiguous(
        cos, torch.float32, (*rows, dim // 2)
    ) and _is_none_or_contiguous(sin, torch.float32, (*rows, dim // 2))
    if (
        not angles
        or not _is_none_or_contiguous(slots, torch.int64, rows)
        or not _is_none_or_contiguous(q_scale, torch.float32, rows)
    ):
        return False
    if any(each is not None and each.data_ptr() % 16 for each in (bias, cos, sin)):
        return False
    if not _supports_pages(k_cache, v_cache, x.dtype):
        return False
    return weight.shape == ((heads + 2 * k_cache.shape[1]) * dim, x.shape[1])


def _is_none_or_contiguous(
    each: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]
) -> bool:
    return each is None or (each.dtype is dtype and each.shape == shape and each.is_contiguous())


def _supports_pages(k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether keys and values lie alike, in pages that the kernel can write: 16 bytes at a time."""
    strides, (pages, _, page, dim) = k_cache.stride(), k_cache.shape
    if strides != v_cache.stride() or k_cache.shape != v_cache.shape or strides[3] != 1:
        return False
    if any(each.dtype is not dtype or each.data_ptr() % 16 for each in (k_cache, v_cache)):
        return False
    counted = page & (page - 1) == 0 and pages * page < _MAX_ELEMENTS
    return dim in HEAD_DIMS and counted and not any(step % 8 for step in strides[:3])


def fused_is_faster(rows: int, outputs: int, num_sms: int) -> bool:
    """Whether one kernel is faster than cuBLAS and the rotation behind it."""
    return gemm.large_m_is_faster(rows, outputs, num_sms, (TILE_WIDTH,), MIN_TILE_EFFICIENCY)


def _is_fused_problem_faster(problem: GemmProblem) -> bool:
    """The same of a problem whose values can be counted in 32 bits."""
    counted = problem.device >= 0 and problem.m * problem.n < _MAX_ELEMENTS
    return counted and fused_is_faster(problem.m, problem.n, launch.sm_count(problem.device))


# prompts whose tiles fill the SMs
SUPPORTED_PROBLEMS = (
    GemmSupportRange(
        m=(gemm.LARGE_M_MIN_ROWS, UNBOUNDED), dtypes=HALF_DTYPES, faster=_is_fused_problem_faster
    ),
)


def warmup_sizes(x: torch.Tensor, weight: torch.Tensor, max_rows: int) -> list[int]:
    """One number of rows up to ``max_rows`` that is served, if any: all use the same config."""
    if not supports_operands(x.new_empty((1, x.shape[1])), weight, None):
        return []
    sizes = (weight.shape[0], launch.sm_count(x.get_device()))
    return [
        rows for rows in gemm.large_m_warmup_candidates(max_rows) if fused_is_faster(rows, *sizes)
    ][:1]


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, inputs: RopeCacheInputs
) -> torch.Tensor:
    """As the reference, sums in float32; negative slots are left out."""
    k_cache, v_cache, slots, heads, cos, sin, q_scale, q_norm, _, _, k_scale, _ = inputs
    assert q_norm is None, "see supports"
    assert k_scale is None, "see supports"
    _, kv_heads, page, dim = k_cache.shape
    q = torch.empty((x.shape[0], heads, dim), dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        desks = 2 * 64 * 128 * 2
        biases = 2 * TILE_WIDTH * 2
        barriers = 6 * 8
        shared = gemm.pipeline_bytes(TILE_WIDTH) + desks + biases + barriers
        named = kernel_macros(dim, biased=bias is not None, dtype=x.dtype)
        kernel = launch.compile_and_load_kernel(
            "qkv_rope_cache", "qkv_rope_cache", named, LARGE_M_THREADS, shared, x.get_device()
        )
        blocks, sizes = gemm.plan_tile_launch(x, weight.shape[0], TILE_WIDTH, TILE_WIDTH // 2)
        where = launch.data_pointers(bias, q, k_cache, v_cache, slots, cos, sin, q_scale)
        heads_of = (heads, kv_heads, page.bit_length() - 1, 0)
        work = struct.pack("=8Q3q10i", *where, *k_cache.stride()[:3], *sizes, *heads_of)
        kernel.launch(
            blocks,
            gemm.matrix_tensor_map(x, LARGE_M_TILE_ROWS),
            gemm.matrix_tensor_map(weight, TILE_WIDTH // 2),
            work,
            pdl=True,
        )
    return q
