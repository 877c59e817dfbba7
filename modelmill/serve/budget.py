"""One memory budget for several engines: they load one after another, and each takes its part of what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelmill.core.config import RunConfig
from modelmill.core.ram import prefix_bytes
from modelmill.core.size import byte_text

VIEWER_BYTES = 2 << 30
"""For pictures, activations and masks of a segmentation engine: those of the largest picture that is taken."""


def share(left: int, mine: int, others: Sequence[int]) -> int:
    """Bytes for an engine with ``mine`` bytes of weights, of ``left``, while ``others`` are still to come.

    Every engine gets room for its weights; what remains is divided equally.
    """
    spare = left - mine - sum(others)
    return mine + spare // (1 + len(others))


def for_viewer(weights: int, embeddings: int) -> int:
    """What a segmentation engine takes: its weights, the embeddings it keeps, and room to work in."""
    return weights + embeddings + VIEWER_BYTES


def on_cpu(config: RunConfig, free: int, others: int, aside: int = 0) -> RunConfig:
    """``config`` with this engine's part of the KV bytes. free: what KV caches may take now, all together.

    others: how many engines with a KV cache there are beside it; those that have loaded take memory only as they write.
    aside: what of the memory segmentation engines take; it is not in ``free`` any more.
    """
    if config.kv_cache_bytes is not None or not (others or aside):
        return config
    mine = max(free // (1 + others), 1)
    kept = prefix_bytes(mine) if config.prefix_cache_bytes is None else config.prefix_cache_bytes
    return replace(config, kv_cache_bytes=mine, prefix_cache_bytes=kept)


def on_cuda(config: RunConfig, free: int, total: int, mine: int, others: Sequence[int], aside: int = 0) -> RunConfig:
    """``config`` with this engine's part of the GPU. free, total: bytes of the device now; other engines hold the rest.

    gpu_memory_utilization bounds all of them together. aside: what segmentation engines will take yet.
    """
    if config.kv_cache_bytes is not None or not (others or aside):
        return config
    used = total - free + aside
    mine_now = share(int(total * config.gpu_memory_utilization) - used, mine, others)
    held = total - free
    return replace(config, gpu_memory_utilization=min(max((held + mine_now) / total, 1e-6), 1.0))


def parted(config: RunConfig, count: int) -> RunConfig:
    """``config`` for one of ``count`` engines: KV bytes that were given are for all of them."""
    if count < 2:
        return config
    given = (config.kv_cache_bytes, config.prefix_cache_bytes)
    kv, kept = (None if each is None else max(each // count, 1) for each in given)
    return replace(config, kv_cache_bytes=kv, prefix_cache_bytes=kept)


def told(device: str, tokens: int, kv_bytes: int, kept_bytes: int) -> str:
    """One line about the KV cache of an engine that is ready. tokens: that it holds; kept_bytes: for prefixes."""
    line = f"KV cache: {byte_text(kv_bytes)} for {tokens:,} tokens"
    if device != "cpu":
        return line
    kept = f"; up to {byte_text(kept_bytes)} of it keep prompt beginnings" if kept_bytes else ""
    return f"{line}, RAM that is taken as they come{kept}"
