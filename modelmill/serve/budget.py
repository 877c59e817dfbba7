"""One memory budget for several engines: they load one after another, and each takes its part of
what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelmill.core.byte_size import format_bytes
from modelmill.core.config import RunConfig
from modelmill.core.memory_limits import prefix_cache_bytes

SEGMENT_WORKSPACE_BYTES = 2 << 30
"""For pictures, activations and masks of a segmentation engine: those of the largest picture that
is taken.
"""


def memory_share(free_bytes: int, weight_bytes: int, later_weight_bytes: Sequence[int]) -> int:
    """Bytes, of ``free_bytes``, for an engine with ``weight_bytes`` bytes of weights that others
    load after.

    Every engine gets room for its weights; what remains is divided equally.
    """
    spare = free_bytes - weight_bytes - sum(later_weight_bytes)
    return weight_bytes + spare // (1 + len(later_weight_bytes))


def segment_engine_bytes(weight_bytes: int, embedding_cache_bytes: int) -> int:
    """What a segmentation engine takes: its weights, the embeddings it keeps, and room to work
    in.
    """
    return weight_bytes + embedding_cache_bytes + SEGMENT_WORKSPACE_BYTES


def with_cpu_budget(
    config: RunConfig, free_bytes: int, num_other_engines: int, segment_bytes: int = 0
) -> RunConfig:
    """``config`` with this engine's part of the KV bytes. free_bytes: what KV caches may take now,
    all together.

    num_other_engines: with a KV cache, beside it; those that have loaded take memory only as they
    write.
    segment_bytes: what of the memory segmentation engines take; it is not in ``free_bytes`` any
    more.
    """
    if config.kv_cache_bytes is not None or not (num_other_engines or segment_bytes):
        return config
    mine = max(free_bytes // (1 + num_other_engines), 1)
    kept = (
        prefix_cache_bytes(mine) if config.prefix_cache_bytes is None else config.prefix_cache_bytes
    )
    return replace(config, kv_cache_bytes=mine, prefix_cache_bytes=kept)


def with_cuda_budget(
    config: RunConfig,
    free_bytes: int,
    total_bytes: int,
    weight_bytes: int,
    later_weight_bytes: Sequence[int],
    segment_bytes: int = 0,
) -> RunConfig:
    """``config`` with this engine's part of the GPU. free_bytes, total_bytes: of the device; others
    hold the rest.

    gpu_memory_utilization bounds all of them together. segment_bytes: what segmentation engines
    will take yet.
    """
    if config.kv_cache_bytes is not None or not (later_weight_bytes or segment_bytes):
        return config
    used = total_bytes - free_bytes + segment_bytes
    mine_now = memory_share(
        int(total_bytes * config.gpu_memory_utilization) - used, weight_bytes, later_weight_bytes
    )
    held = total_bytes - free_bytes
    return replace(
        config, gpu_memory_utilization=min(max((held + mine_now) / total_bytes, 1e-6), 1.0)
    )


def split_kv_budget(config: RunConfig, num_engines: int) -> RunConfig:
    """``config`` for one of ``num_engines`` engines: KV bytes that were given are for all of
    them.
    """
    if num_engines < 2:
        return config
    given = (config.kv_cache_bytes, config.prefix_cache_bytes)
    kv, kept = (None if each is None else max(each // num_engines, 1) for each in given)
    return replace(config, kv_cache_bytes=kv, prefix_cache_bytes=kept)


def kv_cache_summary(device: str, num_tokens: int, kv_bytes: int, prefix_cache_bytes: int) -> str:
    """One line about the KV cache of an engine that is ready. num_tokens: that it holds."""
    line = f"KV cache: {format_bytes(kv_bytes)} for {num_tokens:,} tokens"
    if device != "cpu":
        return line
    kept = (
        f"; up to {format_bytes(prefix_cache_bytes)} of it keep prompt beginnings"
        if prefix_cache_bytes
        else ""
    )
    return f"{line}, RAM that is taken as they come{kept}"
