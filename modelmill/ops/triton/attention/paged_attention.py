"""Attention over a paged KV cache: split-context decode and tiled prefill.

The kernels are in paged_decode and paged_prefill, those of latent attention in paged_latent.

Launch sizes depend only on host integers (max_query, max_context, shapes); the kernels read the
lengths on the device. So a CUDA graph captured for an upper bound is valid for every shorter
context. Decoding divides each sequence's *own* context among its programs, so a short context under
a large bound still uses the whole GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from modelmill.ops.attention_support import AttentionPhase, AttentionProblem, AttentionSupportRange
from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.kernel_support import UNBOUNDED, Kernel
from modelmill.ops.paged_attention import DECLARATION, PagedAttentionInputs
from modelmill.ops.triton.attention import paged_decode, paged_latent, paged_prefill
from modelmill.ops.triton.attention.score_mods import LOG2E, KernelScoreMods
from modelmill.ops.triton.common.device import (
    max_shared_bytes,
    next_power_of_two,
    sm_count,
    supports_fp8,
)
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options

MIN_SPLIT_KEYS = 64  # minimum keys of a split
MIN_SPLIT_KEYS_UNGROUPED_HEADS = 16  # the same where each head has its own program
MAX_SPLITS = 64
MAX_QUERY_HEADS_PER_PROGRAM = 128  # query heads of a KV head that one program computes
MIN_DIM, MAX_DIM = 8, 256  # channels of a head
EXTRA_PREFILL_PROGRAMS = 8  # extra programs for the last tiles of prompts in a mixed batch


def supports(inputs: PagedAttentionInputs) -> bool:
    """Whether keys and values have one layout with contiguous channels; 8-bit pages are packed."""
    q, k_cache, v_cache = inputs[:3]
    k_scale, v_scale = inputs[10:12]
    layout = k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1 and q.stride(2) == 1
    if k_scale is None or v_scale is None:
        return layout
    return (
        layout and k_cache.is_contiguous() and k_scale.is_contiguous() and v_scale.is_contiguous()
    )


def prefill(
    inputs: PagedAttentionInputs, out: torch.Tensor | None = None, *, mixed: bool = False
) -> torch.Tensor:
    """Fill the rows of prompts and, where not ``mixed``, those of single queries.

    Rows of padding sequences (context_len 0) are zero; rows that belong to no sequence are
    undefined.
    """
    tensors, mods, scale = _prepare_kernel_operands(inputs, out)
    _prefill(tensors, mods, (inputs.max_query, inputs.max_context), scale, inputs.window, mixed)
    return tensors[-1]


def decode(inputs: PagedAttentionInputs, out: torch.Tensor | None = None) -> torch.Tensor:
    """Fill the rows of single queries, and leave the others alone."""
    tensors, mods, scale = _prepare_kernel_operands(inputs, out)
    _decode(tensors, mods, inputs.max_context, scale, inputs.window)
    return tensors[-1]


def _prepare_kernel_operands(
    inputs: PagedAttentionInputs, out: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], KernelScoreMods, float]:
    """The kernels' tensors, the output last; their changes of scores, and scale to base two."""
    q, k_cache, v_cache, *indices = inputs[:6]
    k_scale, v_scale = inputs[10:12]
    if out is None:
        tokens, heads, dim = q.shape
        out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
    scales = (q, q) if k_scale is None or v_scale is None else (k_scale, v_scale)
    mods = KernelScoreMods.from_score_mods(inputs.score_mods, q)
    return (q, k_cache, v_cache, *scales, *indices, out), mods, inputs.scale * LOG2E


_SAME_DTYPE_PAGES_SUPPORT = AttentionSupportRange(
    page_sizes=(1, UNBOUNDED),
    fits=lambda step: MIN_DIM <= step.dim <= MAX_DIM,
    serves_score_mods=True,
)
_QUANTIZED_PAGES_SUPPORT = replace(
    _SAME_DTYPE_PAGES_SUPPORT,
    scaled=True,
    page_dtypes=(torch.int8, torch.float8_e4m3fn),
    fits=lambda step: (
        MIN_DIM <= step.dim <= MAX_DIM and _supports_page_dtype(step.page_dtypes[0], step.device)
    ),
)
_SAME_DTYPE_LATENT_PAGES_SUPPORT = replace(
    _SAME_DTYPE_PAGES_SUPPORT,
    latent=True,
    serves_score_mods=False,
    fits=lambda step: _has_latent_sizes(step),
)
_QUANTIZED_LATENT_PAGES_SUPPORT = replace(
    _SAME_DTYPE_LATENT_PAGES_SUPPORT,
    scaled=True,
    page_dtypes=_QUANTIZED_PAGES_SUPPORT.page_dtypes,
    fits=lambda step: (
        _has_latent_sizes(step) and _supports_page_dtype(step.page_dtypes[0], step.device)
    ),
)
_PREFILL_AND_DECODE_PHASES = (
    (AttentionPhase.PREFILL, AttentionPhase.PROMPTS),
    (AttentionPhase.DECODE, AttentionPhase.SINGLE_QUERIES),
)


def _supports_page_dtype(page_dtype: torch.dtype, device: torch.device) -> bool:
    return page_dtype is torch.int8 or supports_fp8(device)


def _has_latent_sizes(step: AttentionProblem) -> bool:
    """Whether the kernels of latent attention have tiles for these channels."""
    values = step.value_dim or 0
    return (
        step.kv_heads == 1
        and 0 < values <= paged_latent.MAX_VALUE_DIM
        and 0 < step.dim - values <= paged_latent.MAX_ROTARY_DIM
    )


def _has_no_window(inputs: PagedAttentionInputs) -> bool:
    return inputs.window is None


KERNELS = (
    *(
        Kernel(replace(pages, phases=phases), run)
        for pages in (_SAME_DTYPE_PAGES_SUPPORT, _QUANTIZED_PAGES_SUPPORT)
        for phases, run in zip(_PREFILL_AND_DECODE_PHASES, (prefill, decode), strict=True)
    ),
    *(
        Kernel(replace(pages, phases=phases), run, _has_no_window)
        for pages in (_SAME_DTYPE_LATENT_PAGES_SUPPORT, _QUANTIZED_LATENT_PAGES_SUPPORT)
        for phases, run in zip(
            _PREFILL_AND_DECODE_PHASES, (paged_latent.prefill, paged_latent.decode), strict=True
        )
    ),
)
SUPPORTED_PROBLEMS = tuple(kernel.range for kernel in KERNELS)
run = make_kernel_dispatcher(KERNELS, DECLARATION)
_prefill_launcher = CachedLauncher(paged_prefill.paged_prefill_kernel)


class _DecodeLaunchConfig(NamedTuple):
    """How a decode step is divided.

    Attributes:
        group_heads: one program computes all query heads of a KV head.
        tile: (keys per block, warps, stages).
        splits: programs that share a context.
        min_keys: minimum keys of a split.
    """

    group_heads: bool
    tile: tuple[int, int, int]
    splits: int
    min_keys: int


def warmup_sizes(
    q: torch.Tensor, k_cache: torch.Tensor, max_sequences: int, max_context: int, window: int | None
) -> list[tuple[int, int]]:
    """Decode steps that together use every compiled variant of the decode kernels.

    Every variant is compiled at its first launch, which takes a fraction of a second.

    Args:
        q: as for ``run``.
        k_cache: as for ``run``.
        max_sequences: maximum sequences of a step.
        max_context: maximum tokens of a sequence.
        window: as for ``run``.

    Returns:
        (sequences, bound of their context) for each variant.
    """
    if k_cache.shape[3] > MAX_DIM:  # latent attention has one variant
        return [(1, max_context)]
    steps: dict[tuple[_DecodeLaunchConfig, bool], tuple[int, int]] = {}
    max_context = max_context if window is None else min(max_context, window)
    for batch in range(1, max_sequences + 1):
        max_config = _decode_config(q, k_cache, batch, max_context)
        for count in range(1, max_config.splits + 1):
            keys = min(count * max_config.min_keys, max_context)
            steps.setdefault((_decode_config(q, k_cache, batch, keys), batch == 1), (batch, keys))
    return list(steps.values())


def _decode_config(q: torch.Tensor, k: torch.Tensor, batch: int, keys: int) -> _DecodeLaunchConfig:
    heads, kv_heads = q.shape[1], k.shape[1]
    # One query head per KV head would fill 1/16 of a tensor-core tile, and float32 must not be
    # rounded to tf32: both use vector instructions, one head per program.
    tile = _group_decode_tile(k, q, batch * kv_heads) if heads != kv_heads else None
    if tile is not None and q.dtype != torch.float32:
        block_keys, warps, stages, programs_per_sm = tile
        splits = _num_splits(batch * kv_heads, programs_per_sm, keys, MIN_SPLIT_KEYS, q.device)
        return _DecodeLaunchConfig(True, (block_keys, warps, stages), splits, MIN_SPLIT_KEYS)
    return _DecodeLaunchConfig(
        False,
        (0, 2, 0),
        _num_splits(batch * heads, 8, keys, MIN_SPLIT_KEYS_UNGROUPED_HEADS, q.device),
        MIN_SPLIT_KEYS_UNGROUPED_HEADS,
    )


def _num_splits(
    pairs: int, programs_per_sm: int, keys: int, min_keys: int, device: torch.device
) -> int:
    """Number of programs that share one context: at most ``programs_per_sm`` per SM, none empty.

    Rounded down: one program more than fit at once would have to wait, and all others for it.
    """
    splits = programs_per_sm * sm_count(device) // pairs
    return max(1, min(splits, -(-keys // min_keys), MAX_SPLITS))


def _decode(
    tensors: tuple[torch.Tensor, ...],
    mods: KernelScoreMods,
    max_context: int,
    scale: float,
    window: int | None,
) -> None:
    q, k, v, k_scale, v_scale, tables, starts, lengths, out = tensors
    _, kv_heads, page_size, dim = k.shape
    heads, batch = q.shape[1], tables.shape[0]
    keys = max_context if window is None else min(max_context, window)
    group_heads, (block_keys, warps, stages), splits, min_keys = _decode_config(q, k, batch, keys)
    parts = sums = out
    if splits > 1:
        parts = torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((batch, heads, splits, 2), dtype=torch.float32, device=q.device)
    common = {
        "HEADS": heads,
        "DIM": dim,
        "WINDOW": window or 0,
        "SPLITS": splits,
        "MIN_KEYS": min_keys,
    }
    # The merge kernel may start early (PDL); it waits for the splits.
    first, last = (
        pdl_launch_options(q.device, 1 if splits > 1 else batch),
        pdl_launch_options(q.device, batch),
    )
    layout = {
        "GROUP": heads // kv_heads,
        "PAGE": page_size,
        "WIDE": _needs_int64_offsets(k),
        "SCALED": k_scale is not q,
    }
    block_d = next_power_of_two(dim)
    strides = (tables.shape[1], tables.stride(0), q.stride(0), q.stride(1), *k.stride()[:3])
    tensors = (q, k, v, k_scale, v_scale, tables, starts, lengths, out, parts, sums)
    pointers = (*tensors, mods.slopes, mods.sinks, scale)
    if group_heads:
        group = max(16, next_power_of_two(heads // kv_heads))
        paged_decode.grouped_paged_decode_kernel[(kv_heads, batch, splits)](
            *pointers, *strides, BLOCK_G=group, BLOCK_N=block_keys, BLOCK_D=max(16, block_d),
            PAIRED=k_scale is not q and dim % 2 == 0 and block_d >= 32,
            num_warps=warps, num_stages=stages, **common, **layout, **mods.constexpr_args, **first,
        )  # fmt: skip
    else:
        block_n = max(1, 16 * 128 // max(128, block_d * q.element_size() // 2))
        paged_decode.paged_decode_kernel[(heads, batch, splits)](
            *pointers,
            *strides,
            TURNS=2,
            BLOCK_N=block_n,
            BLOCK_D=block_d,
            num_warps=warps,
            **common,
            **layout,
            **mods.constexpr_args,
            **first,
        )
    if splits > 1:
        paged_decode.merge_splits_kernel[(heads, batch)](
            parts, sums, starts, lengths, out, mods.sinks, SINKS=mods.has_sinks,
            BLOCK_S=next_power_of_two(splits), BLOCK_D=block_d, num_warps=4,
            **common, **last,
        )  # fmt: skip


def _group_decode_tile(
    k: torch.Tensor, q: torch.Tensor, pairs: int
) -> tuple[int, int, int, int] | None:
    """(keys per block, warps, stages, programs per SM) of grouped decode, measured on an H200.

    None where a group of heads does not fit into shared memory.
    """
    if k.shape[3] > 128 or q.shape[1] > 16 * k.shape[1]:
        return _large_group_tile(k.shape[3], q.shape[1] // k.shape[1], max_shared_bytes(q.device))
    if k.dtype == q.dtype:
        return 32, 1, 2, 6
    # int8 is limited by its conversion: with enough programs, one warp per program avoids barriers.
    if k.dtype == torch.int8 and pairs >= 2 * sm_count(q.device):
        return 32, 1, 3, 8
    return MIN_SPLIT_KEYS, 2, 3, 4


def _large_group_tile(dim: int, group: int, shared_limit: int) -> tuple[int, int, int, int] | None:
    """The tile with the most keys whose queries, keys, values and weights fit, of 16 bits each."""
    block_g, block_d = max(16, next_power_of_two(group)), next_power_of_two(dim)
    for keys in (MIN_SPLIT_KEYS, 32, 16) if block_g <= MAX_QUERY_HEADS_PER_PROGRAM else ():
        if 2 * (block_g * block_d + 2 * keys * block_d + block_g * keys) <= shared_limit:
            return keys, 4, 2, 4
    return None


def _needs_int64_offsets(cache: torch.Tensor) -> bool:
    """Whether offsets in a cache need 64 bits; 32-bit arithmetic is faster."""
    return cache.stride(0) * cache.shape[0] >= 1 << 31


def _prefill(
    tensors: tuple[torch.Tensor, ...],
    mods: KernelScoreMods,
    bounds: tuple[int, int],
    scale: float,
    window: int | None,
    mixed: bool,
) -> None:
    q, k, _, k_scale, _, tables, *_ = tensors
    _, kv_heads, page_size, dim = k.shape
    heads, batch = q.shape[1], tables.shape[0]
    block_d = max(16, next_power_of_two(dim))
    block_m, block_n, warps, stages, registers = _select_prefill_tile(
        bounds, heads * batch, block_d, q, k
    )
    # Each sequence has at most one partial tile. In a mixed batch most sequences have a single
    # query and no tile, so a program per sequence would be idle; if there are more tiles, programs
    # process several.
    programs = q.shape[0] // block_m + (min(batch, EXTRA_PREFILL_PROGRAMS) if mixed else batch)
    fixed = (q.stride(0), q.stride(1), *k.stride()[:3])
    scaled, sequences = k_scale is not q, 16 if batch <= 16 else max(256, next_power_of_two(batch))
    sizes = (
        heads,
        heads // kv_heads,
        dim,
        page_size,
        _needs_int64_offsets(k),
        window or 0,
        scaled,
        *mods[2:],
        mixed,
        sequences,
    )
    _prefill_launcher(
        (heads, programs, 1),
        (*tensors[:5], mods.slopes, mods.sinks, *tensors[5:]),
        (scale, batch, tables.shape[1], tables.stride(0), *fixed),
        fixed,
        (*sizes, block_m, block_n, block_d),
        {"num_warps": warps, "num_stages": stages, "maxnreg": registers},
    )


def _select_prefill_tile(
    bounds: tuple[int, int], pairs: int, block_d: int, q: torch.Tensor, k: torch.Tensor
) -> tuple[int, int, int, int, int | None]:
    """(queries, keys, warps, stages, maximum registers) of a prefill tile, measured on an H200."""
    max_query, max_context = bounds
    if q.dtype == torch.float32:
        return (16, 16, 4, 1, None) if block_d > 128 else (32, 32, 4, 1, None)
    if max_query <= 16:
        return 16, 64, 4, 3 if block_d <= 128 else 2, None
    if k.element_size() == 1 and block_d <= 128:
        # The conversion needs registers: large tiles, one program per SM.
        if max_shared_bytes(q.device) < 160 << 10:
            return 64, 64, 4, 2, None
        return (64, 128, 4, 2, None) if max_query <= 64 else (128, 128, 8, 2, None)
    # Tiles of 128 queries read the keys half as often, but need enough tiles for an even load.
    tiles = -(-max_query // 128) * pairs
    is_balanced = tiles >= 4 * sm_count(q.device) or max_context >= 2 * max_query
    if block_d > 128:  # 104 KiB of shared memory with 64 keys
        return 64, 64 if max_shared_bytes(q.device) >= 104 << 10 else 32, 8, 2, None
    if max_query <= 64 or not is_balanced:
        return 64, 64, 4, 3, None
    # With 128 registers two programs share an SM: the softmax of one overlaps the products of the
    # other.
    return 128, 64, 8, 2, 128
