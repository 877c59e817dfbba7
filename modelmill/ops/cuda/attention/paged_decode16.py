"""Decode attention over 16-bit pages (paged_decode16.cu): up to eight query heads per KV head."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import NamedTuple

import torch

from modelmill.ops.attention_support import AttentionSupportRange
from modelmill.ops.cuda.attention import paged_decode
from modelmill.ops.cuda.attention.paged_decode import DTYPE_DEFINES, LOG2E
from modelmill.ops.cuda.common import build, launch
from modelmill.ops.kernel_support import Kernel
from modelmill.ops.paged_attention import PagedAttentionInputs

MAX_GROUP_HEADS = 8  # query heads of a KV head: columns of a product


class PagedDecodeKernelConfig(NamedTuple):
    """Kernel config: warps per block, blocks per SM, tiles of 16 keys per warp iteration.

    reload_query: whether the query is read from shared memory again and again instead of staying in
    registers. l2_prefetch_rounds: how many times those keys are brought to the L2 cache before the
    kernel in front has ended.
    """

    warps: int
    blocks_per_sm: int
    key_tiles: int
    reload_query: int = 0
    l2_prefetch_rounds: int = 1

    @property
    def min_keys(self) -> int:
        """Keys with which every warp of a block has something to do."""
        return 16 * self.key_tiles * self.warps


# By the channels of a head, as measured on an H200. Where several blocks share a context:
SPLIT_CONFIGS = {
    64: PagedDecodeKernelConfig(4, 3, 2),
    **dict.fromkeys((80, 96, 112, 128), PagedDecodeKernelConfig(4, 3, 1)),
    256: PagedDecodeKernelConfig(4, 2, 1, reload_query=1),
}
# Sequences times KV heads of which all have their blocks at once; where there are more:
MAX_CONCURRENT_PAIRS, UNSPLIT_CONFIGS = (
    384,
    dict.fromkeys((80, 96, 112, 128), PagedDecodeKernelConfig(4, 2, 2)),
)
# Where few pairs leave most of the GPU idle: of contexts up to so many keys, and of longer ones.
# Clusters of eight blocks of more pairs do not run at once:
MAX_FEW_PAIRS, FEW_PAIRS_SHORT_KEYS = 8, 2048
FEW_PAIRS_CONFIGS = {128: (PagedDecodeKernelConfig(8, 1, 1), PagedDecodeKernelConfig(8, 1, 2))}
# Where query heads share keys and values, and there are KV heads enough (above AT_ONCE the variant
# behind is faster):
GQA_CONFIGS, MAX_PAIRS_WITHOUT_GQA_CONFIG = {128: PagedDecodeKernelConfig(8, 1, 2)}, 32


def choose_config_and_splits(
    pairs: int, group: int, dim: int, keys: int, num_sms: int
) -> tuple[PagedDecodeKernelConfig, int]:
    """How a step is computed, and the blocks that share a context.

    pairs: sequences times KV heads.
    """
    if pairs <= MAX_FEW_PAIRS and dim in FEW_PAIRS_CONFIGS:
        form = FEW_PAIRS_CONFIGS[dim][keys > FEW_PAIRS_SHORT_KEYS]
        return form, paged_decode.num_splits(pairs, keys, num_sms, form.min_keys)
    form = SPLIT_CONFIGS[dim]
    splits = paged_decode.num_splits(pairs, keys, form.blocks_per_sm * num_sms, form.min_keys)
    if splits == 1:
        return (UNSPLIT_CONFIGS.get(dim, form) if pairs > MAX_CONCURRENT_PAIRS else form), 1
    if group > 1 and pairs > MAX_PAIRS_WITHOUT_GQA_CONFIG and dim in GQA_CONFIGS:
        form = GQA_CONFIGS[dim]
        splits = paged_decode.num_splits(pairs, keys, form.blocks_per_sm * num_sms, form.min_keys)
    return form, splits


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    return build.kernel_compile_failure_reason(
        device_type,
        "paged_decode16",
        kernel_macros(torch.bfloat16, 128, 16, 1, 1, SPLIT_CONFIGS[128]),
    )


def supports_decode(inputs: PagedAttentionInputs) -> bool:
    """Whether rows of the queries are aligned, pages packed, indices int32.

    Of the score mods, whether there are sinks at most.
    """
    q, k_cache, v_cache, *indices = inputs[:6]
    mods = inputs.score_mods
    if mods is not None and (mods.softcap is not None or mods.alibi_slopes is not None):
        return False
    aligned = (
        q.stride(2) == 1
        and q.data_ptr() % 16 == 0
        and q.stride(0) % 8 == 0
        and q.stride(1) % 8 == 0
    )
    return aligned and paged_decode.supports_cache_and_indices((k_cache, v_cache), tuple(indices))


def decode(inputs: PagedAttentionInputs, out: torch.Tensor | None = None) -> torch.Tensor:
    """Fill the rows of single queries, and leave the others alone."""
    q, k_cache, v_cache, tables, starts, lengths = inputs[:6]
    out = paged_decode.allocate_output(q) if out is None else out
    sinks = None if inputs.score_mods is None else inputs.score_mods.sinks
    return run(q, (k_cache, v_cache), (tables, starts, lengths), *inputs[7:10], out, sinks)


_SINGLE_HEAD_GROUP_RANGE = AttentionSupportRange(
    phases=paged_decode.DECODE_PHASES,
    max_group_heads=1,
    dims=tuple(SPLIT_CONFIGS),
    page_sizes=paged_decode.PAGE_SIZE_RANGE,
    dtypes=tuple(DTYPE_DEFINES),
    on_gpu=True,
    serves_score_mods=True,
)
KERNELS = (
    Kernel(_SINGLE_HEAD_GROUP_RANGE, decode, supports_decode),
    Kernel(
        replace(
            _SINGLE_HEAD_GROUP_RANGE,
            max_group_heads=MAX_GROUP_HEADS,
            pairs=(1, MAX_CONCURRENT_PAIRS),
        ),
        decode,
        supports_decode,
    ),
)


def warmup_sizes(
    heads: tuple[int, int], dim: int, max_sequences: int, max_context: int, num_sms: int
) -> list[tuple[int, int]]:
    """Return (sequences, context bound) of decode steps that cover every kernel config.

    heads: query heads, KV heads. max_sequences, max_context: sequences of a step, keys that a query
    of one sees.
    """
    query_heads, kv_heads = heads
    group = query_heads // kv_heads
    return paged_decode.warmup_sizes(
        lambda batch, keys: choose_config_and_splits(batch * kv_heads, group, dim, keys, num_sms),
        max_sequences,
        max_context,
    )


def run(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    max_context: int,
    scale: float,
    window: int | None,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill the rows of single queries of ``out`` [T, heads · D], and leave the others alone.

    caches: keys and values; indices: page tables, starts, lengths; sinks: of ``ScoreMods``.
    """
    tables = indices[0]
    _, kv_heads, page, dim = caches[0].shape
    group, pairs = q.shape[1] // kv_heads, tables.shape[0] * kv_heads
    keys = max_context if window is None else min(max_context, window)
    form, splits = choose_config_and_splits(
        pairs, group, dim, keys, launch.sm_count(q.get_device())
    )
    pointers = launch.data_pointers(q, *caches, *indices, out, sinks)
    counts = (kv_heads, tables.shape[1], tables.stride(0), q.stride(0), q.stride(1), window or 0)
    invite = tables.shape[0] == 1  # its step is many small kernels: the next is placed early
    work = struct.pack("=8Q6ifi", *pointers, *counts, scale * LOG2E, invite)
    chosen = kernel_macros(q.dtype, dim, page, group, splits, form, sinks=sinks is not None)
    paged_decode.launch_decode(
        q, "paged_decode16", chosen, form.warps, pairs * splits, work, own_kv_heads=group == 1
    )
    return out


def kernel_macros(
    dtype: torch.dtype,
    dim: int,
    page: int,
    group: int,
    splits: int,
    config: PagedDecodeKernelConfig,
    *,
    sinks: bool = False,
) -> tuple[str, ...]:
    """Of the kernel; group: query heads of a KV head."""
    warps, blocks, tiles, again, early = config
    sizes = (f"DIM={dim}", f"PAGE={page}", f"GROUP={group}", f"SPLITS={splits}")
    cut = (
        f"WARPS={warps}",
        f"BLOCKS={blocks}",
        f"KEY_TILES={tiles}",
        f"RELOAD_QUERY={again}",
        f"L2_PREFETCH={early}",
        f"SINKS={int(sinks)}",
    )
    return (*sizes, *cut, *DTYPE_DEFINES[dtype])
