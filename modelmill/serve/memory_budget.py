"""Divides one memory budget between several engines.

Engines load one after another, and each takes its share of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelmill.core.byte_size import format_bytes
from modelmill.core.config import RunConfig
from modelmill.core.memory_limits import max_cached_prefix_bytes

SEGMENT_WORKSPACE_BYTES = 2 << 30
"""Memory of a segmentation engine for images, activations and masks of the largest allowed image.
"""


def engine_memory_share_bytes(
    free_bytes: int, weight_bytes: int, later_weight_bytes: Sequence[int]
) -> int:
    """Memory for an engine, of ``free_bytes``, when other engines load after it.

    Every engine gets its weights; the rest is divided equally.
    """
    spare = free_bytes - weight_bytes - sum(later_weight_bytes)
    return weight_bytes + spare // (1 + len(later_weight_bytes))


def segmentation_engine_bytes(weight_bytes: int, embedding_cache_bytes: int) -> int:
    """Memory of a segmentation engine: weights, cached embeddings and workspace."""
    return weight_bytes + embedding_cache_bytes + SEGMENT_WORKSPACE_BYTES


def with_cpu_cache_budget(
    config: RunConfig, free_bytes: int, num_other_engines: int, segment_bytes: int = 0
) -> RunConfig:
    """Return ``config`` with this engine's share of the memory for caches as ``kv_cache_bytes``.

    The recurrent states of a model that has any are taken from it later
    (``loader.cache_split``).

    Args:
        config: of the engine.
        free_bytes: available to all KV caches and recurrent states together.
        num_other_engines: other engines with a KV cache; loaded ones take memory as they write.
        segment_bytes: memory of segmentation engines, already subtracted from ``free_bytes``.
    """
    if config.kv_cache_bytes is not None or not (num_other_engines or segment_bytes):
        return config
    kv_bytes = max(free_bytes // (1 + num_other_engines), 1)
    prefix_bytes = (
        max_cached_prefix_bytes(kv_bytes)
        if config.prefix_cache_bytes is None
        else config.prefix_cache_bytes
    )
    return replace(config, kv_cache_bytes=kv_bytes, prefix_cache_bytes=prefix_bytes)


def with_gpu_memory_share(
    config: RunConfig,
    free_bytes: int,
    total_bytes: int,
    weight_bytes: int,
    later_weight_bytes: Sequence[int],
    segment_bytes: int = 0,
) -> RunConfig:
    """Return ``config`` with this engine's share of the GPU.

    gpu_memory_utilization limits all engines together.

    Args:
        config: of the engine.
        free_bytes: of the device.
        total_bytes: of the device.
        weight_bytes: weights of this engine.
        later_weight_bytes: weights of each language engine that loads after it.
        segment_bytes: memory that segmentation engines will still take.
    """
    if config.kv_cache_bytes is not None or not (later_weight_bytes or segment_bytes):
        return config
    used = total_bytes - free_bytes + segment_bytes
    share = engine_memory_share_bytes(
        int(total_bytes * config.gpu_memory_utilization) - used, weight_bytes, later_weight_bytes
    )
    used_now = total_bytes - free_bytes
    return replace(
        config, gpu_memory_utilization=min(max((used_now + share) / total_bytes, 1e-6), 1.0)
    )


def with_kv_budget_share(config: RunConfig, num_engines: int) -> RunConfig:
    """Return ``config`` for one of ``num_engines`` engines.

    Configured sizes of KV cache and recurrent states are for all engines together.
    """
    if num_engines < 2:
        return config
    sizes = (config.kv_cache_bytes, config.prefix_cache_bytes, config.state_cache_bytes)
    kv, prefix, state = (None if each is None else max(each // num_engines, 1) for each in sizes)
    return replace(config, kv_cache_bytes=kv, prefix_cache_bytes=prefix, state_cache_bytes=state)


def kv_cache_summary(device: str, num_tokens: int, kv_bytes: int, prefix_cache_bytes: int) -> str:
    """One line about the KV cache of a ready engine, which holds ``num_tokens`` tokens."""
    line = f"KV cache: {format_bytes(kv_bytes)} for {num_tokens:,} tokens"
    if device != "cpu":
        return line
    prefix_note = (
        f"; up to {format_bytes(prefix_cache_bytes)} of it cache prompt prefixes"
        if prefix_cache_bytes
        else ""
    )
    return f"{line}, allocated as they arrive{prefix_note}"
