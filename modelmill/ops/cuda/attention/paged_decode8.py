"""Decode attention over int8 pages in integer arithmetic (paged_decode8.cu), without GQA."""

from __future__ import annotations

import struct

import torch

from modelmill.ops.attention_support import AttentionSupportRange
from modelmill.ops.cuda.attention import paged_decode
from modelmill.ops.cuda.attention.paged_decode import DTYPE_DEFINES, LOG2E
from modelmill.ops.cuda.common import build, launch
from modelmill.ops.kernel_support import Kernel
from modelmill.ops.paged_attention import PagedAttentionInputs

# Sizes of paged_decode8.cu; blocks whose registers fit an SM together.
KEYS_PER_WARP_TILE, WARPS, BLOCKS_PER_SM = 32, 4, 4


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    return build.kernel_compile_failure_reason(
        device_type, "paged_decode8", _kernel_macros(torch.bfloat16, 128, 16, 1)
    )


def supports_decode(inputs: PagedAttentionInputs) -> bool:
    """Whether channels are contiguous, pages and scales packed and indices int32."""
    q, k_cache, v_cache, *indices = inputs[:6]
    k_scale, v_scale = inputs[10:12]
    if k_scale is None or v_scale is None:
        return False
    caches = (k_cache, v_cache, k_scale, v_scale)
    return q.stride(2) == 1 and paged_decode.supports_cache_and_indices(caches, tuple(indices))


def decode(inputs: PagedAttentionInputs, out: torch.Tensor | None = None) -> torch.Tensor:
    """Fill the rows of single queries, and leave the others alone."""
    q, k_cache, v_cache, tables, starts, lengths = inputs[:6]
    k_scale, v_scale = inputs[10:12]
    assert k_scale is not None, "see KERNELS"
    assert v_scale is not None, "see KERNELS"
    out = paged_decode.allocate_output(q) if out is None else out
    caches = (k_cache, v_cache, k_scale, v_scale)
    return run(q, caches, (tables, starts, lengths), *inputs[7:10], out)


KERNELS = (
    Kernel(
        AttentionSupportRange(
            phases=paged_decode.DECODE_PHASES,
            max_group_heads=1,
            dims=(64, 128),
            page_sizes=paged_decode.PAGE_SIZE_RANGE,
            dtypes=tuple(DTYPE_DEFINES),
            page_dtypes=(torch.int8,),
            scaled=True,
            on_gpu=True,
        ),
        decode,
        supports_decode,
    ),
)


def warmup_sizes(
    heads: int, max_sequences: int, max_context: int, device: int
) -> list[tuple[int, int]]:
    """Return (sequences, context bound) of decode steps that cover every kernel config.

    max_sequences, max_context: sequences of a step, keys that a query of one sees.
    """
    room = BLOCKS_PER_SM * launch.sm_count(device)
    return paged_decode.warmup_sizes(
        lambda batch, keys: paged_decode.num_splits(
            batch * heads, keys, room, KEYS_PER_WARP_TILE * WARPS
        ),
        max_sequences,
        max_context,
    )


def run(
    q: torch.Tensor, caches: tuple[torch.Tensor, ...], indices: tuple[torch.Tensor, ...],
    max_context: int, scale: float, window: int | None, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Fill the rows of single queries of ``out`` [T, heads · D], and leave the others alone.

    caches: keys, values and their scales; indices: page tables, starts, lengths.
    """
    tables = indices[0]
    _, heads, page, dim = caches[0].shape
    pairs = tables.shape[0] * heads
    keys = max_context if window is None else min(max_context, window)
    room = BLOCKS_PER_SM * launch.sm_count(q.get_device())
    splits = paged_decode.num_splits(pairs, keys, room, KEYS_PER_WARP_TILE * WARPS)
    pointers = launch.data_pointers(q, *caches, *indices, out)
    counts = (heads, tables.shape[1], tables.stride(0), q.stride(0), q.stride(1), window or 0)
    work = struct.pack("=9Q6if4x", *pointers, *counts, scale * LOG2E)
    paged_decode.launch_decode(
        q, "paged_decode8", _kernel_macros(q.dtype, dim, page, splits), WARPS, pairs * splits, work
    )
    return out


def _kernel_macros(dtype: torch.dtype, dim: int, page: int, splits: int) -> tuple[str, ...]:
    return (
        f"DIM={dim}",
        f"PAGE={page}",
        f"SPLITS={splits}",
        f"WARPS={WARPS}",
        f"BLOCKS={BLOCKS_PER_SM}",
        *DTYPE_DEFINES[dtype],
    )
