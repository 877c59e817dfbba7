"""Shared host code of the paged decode kernels (paged_decode8, paged_decode16)."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from modelmill.ops.attention_support import AttentionPhase
from modelmill.ops.carveout import DECODE_CARVEOUT_PERCENT
from modelmill.ops.cuda.common import launch

LOG2E = 1.4426950408889634
DTYPE_DEFINES = {torch.bfloat16: (), torch.float16: ("HALF",)}
MAX_SPLITS = 8  # blocks of a cluster
PAGE_SIZE_RANGE = (8, 128)


DECODE_PHASES = (AttentionPhase.DECODE, AttentionPhase.SINGLE_QUERIES)


def allocate_output(q: torch.Tensor) -> torch.Tensor:
    """Rows [T, heads · D] to fill."""
    return torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)


def supports_cache_and_indices(
    caches: tuple[torch.Tensor, ...], indices: tuple[torch.Tensor, ...]
) -> bool:
    """Whether caches are packed and indices are int32.

    Caches: keys first. Indices: page tables, starts and lengths.
    """
    packed = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in caches)
    return packed and supports_indices(indices) and indices[0].shape[1] > 0


def supports_indices(indices: tuple[torch.Tensor, ...]) -> bool:
    """Whether page tables, starts and lengths are contiguous int32.

    The stride of a single element does not matter.
    """
    return all(t.dtype == torch.int32 and (t.stride(-1) == 1 or t.shape[-1] <= 1) for t in indices)


def num_splits(pairs: int, keys: int, max_blocks: int, min_keys: int) -> int:
    """Split-KV blocks per context: a power of two, limited by ``max_blocks`` and ``min_keys``."""
    splits = min(max_blocks // pairs, -(-keys // min_keys), MAX_SPLITS)
    return 1 << max(0, splits.bit_length() - 1)


def warmup_sizes(
    plan: Callable[[int, int], Hashable], max_sequences: int, max_context: int
) -> list[tuple[int, int]]:
    """Return (sequences, context bound) of decode steps that cover every launch plan.

    plan: the way for so many sequences and keys. max_sequences, max_context: sequences of a step,
    keys that a query of one sees.
    """
    by_plan: dict[Hashable, tuple[int, int]] = {}
    for batch in range(1, max_sequences + 1):
        for keys in sorted({min(1 << n, max_context) for n in range(4, 14)}):
            by_plan.setdefault(plan(batch, keys), (batch, keys))
    return list(by_plan.values())


def launch_decode(
    q: torch.Tensor,
    name: str,
    macros: tuple[str, ...],
    warps: int,
    blocks: int,
    work: bytes,
    *,
    own_kv_heads: bool = True,
) -> None:
    """Launch the kernel ``name`` of the source of that name, in ``blocks`` blocks, where q is.

    own_kv_heads: each query head has keys of its own, so that blocks share little memory and are
    placed behind rope_cache's.
    """
    device = q.get_device()
    with torch.cuda.device(q.device):
        kernel = launch.compile_and_load_kernel(
            name,
            name,
            macros,
            32 * warps,
            0,
            device,
            DECODE_CARVEOUT_PERCENT if own_kv_heads else None,
        )
        kernel.launch(blocks, work, pdl=True)
