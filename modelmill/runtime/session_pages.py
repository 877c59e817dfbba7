"""Copies the KV pages of a prefix out of the prefix cache and back into it, bit for bit.

A model with recurrent state has a snapshot of it, too, behind the last page.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from modelmill.core.byte_size import format_bytes
from modelmill.core.errors import CapacityError, UsageError
from modelmill.core.kv_page_counts import first_page_in_use
from modelmill.core.types import ImageEmbeddingSpan
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.kv_pages import num_resumable_pages, page_group_key
from modelmill.runtime.session_rank_transfer import (
    CacheBytesByRank,
    gather_cache_bytes_by_rank,
    gather_pages_from_ranks,
    gather_state,
    scatter_pages_to_ranks,
    scatter_state,
)

Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class SessionPages:
    """The pages of a prefix.

    Attributes:
        tokens: of the prefix; they fill the pages.
        data: of each tensor of the KV cache [pages, bytes of a page] uint8; the pages of one page
            group after another, as of ``pages_to_save``. Of several ranks: of each rank, with its
            tensors side by side.
        state: recurrent state behind the last token [bytes of a slot] uint8, of one rank after
            another; None: the model has none.
        spans: ranges of tokens whose embeddings come from images, without the images.
    """

    tokens: tuple[int, ...]
    data: tuple[np.ndarray, ...]
    state: np.ndarray | None = None
    spans: tuple[ImageEmbeddingSpan, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, and of the state."""
        parts = self.data if self.state is None else (*self.data, self.state)
        return sum(each.nbytes for each in parts)


def session_compatibility_layout(core: EngineCore) -> dict[str, Any]:
    """What an engine core must have in common with the one that saved a session.

    With several ranks it asks all of them for their sizes, between two steps.
    """
    layout: dict[str, Any] = {
        "engine": core.digest,
        "page_size": core.page_size,
        "tensors": [
            [list(each.shape[1:]), str(each.dtype).removeprefix("torch.")]
            for each in core.model_runner.kv.tensors
        ],
    }
    states = core.model_runner.states
    if states is not None:
        layout["states"] = [
            [list(each.shape[1:]), str(each.dtype).removeprefix("torch.")] for each in states.states
        ]
        layout["state_bytes"] = states.buffer.shape[1]
    sizes = _gather_cache_bytes_if_parallel(core)
    if sizes is not None:
        layout["rank_page_bytes"] = list(sizes.page_bytes)
        if states is not None:
            layout["state_bytes"] = sum(sizes.state_bytes)
    windows = _group_windows(core)
    return layout if windows == (None,) else {**layout, "windows": list(windows)}


def _gather_cache_bytes_if_parallel(core: EngineCore) -> CacheBytesByRank | None:
    """The sizes of all ranks; None: there is one."""
    if core.model_runner.tp_group.size == 1:
        return None
    with core.model_runner.translate_rank_errors():
        return gather_cache_bytes_by_rank(core.model_runner)


def _group_windows(core: EngineCore) -> Windows:
    """The window of each page group; a single group is saved with all of its pages."""
    windows = core.scheduler.limits.windows
    return windows if len(windows) > 1 else (None,)


def pages_to_save(count: int, page_size: int, windows: Windows) -> list[tuple[int, int]]:
    """The pages that a session of ``count`` pages of tokens keeps: (page group, page), in order.

    Of a group with a window those that the next token reads.
    """
    return [
        (group, page)
        for group, window in enumerate(windows)
        for page in range(first_page_in_use(count * page_size, page_size, window), count)
    ]


def export_session(
    core: EngineCore,
    tokens: Seq[int],
    cache_salt: str,
    max_bytes: int,
    spans: Seq[ImageEmbeddingSpan] = (),
) -> SessionPages:
    """Copy the cached pages of a prefix.

    Args:
        core: between two steps.
        tokens: of a prompt; its full pages are copied, as far as they are cached.
        cache_salt: of the request that computed them.
        max_bytes: of the copy.
        spans: ranges of the prompt whose embeddings come from images.

    Raises:
        UsageError: the engine has no prefix cache, or nothing is cached.
        RankError: another rank has ended.
        CapacityError: the copy would be larger than ``max_bytes``.
    """
    _check_session_support(core)
    keys = core.input_processor.prompt_page_keys(tokens, cache_salt, core.page_size, spans)
    pool, windows = core.scheduler.pool, _group_windows(core)
    count = _num_restorable_pages(core, keys)
    places = pages_to_save(count, core.page_size, windows)
    cached = [pool.cached_page_for_key(page_group_key(keys[page], group)) for group, page in places]
    pages = [page for page in cached if page is not None]
    if not count:
        raise UsageError(
            f"the session has no full page of {core.page_size} tokens in the prefix cache"
        )
    sizes = _gather_cache_bytes_if_parallel(core)
    nbytes = _session_bytes(core, len(pages), sizes)
    if nbytes > max_bytes:
        raise CapacityError(
            f"the session takes {format_bytes(nbytes)}, and --session-bytes leaves "
            f"{format_bytes(max(max_bytes, 0))}; delete saved sessions"
        )
    state = _copy_state_to_host(core, keys[count - 1], sizes)
    data = _copy_pages_to_host(core, pages, sizes)
    end = count * core.page_size
    inside = tuple(replace(each, handle=None) for each in spans if each.position < end)
    return SessionPages(tuple(tokens[:end]), data, state, inside)


def _session_bytes(core: EngineCore, pages: int, sizes: CacheBytesByRank | None) -> int:
    """Bytes of so many pages, and of the state behind them, over all ranks."""
    if sizes is not None:
        return pages * sum(sizes.page_bytes) + sum(sizes.state_bytes)
    states = core.model_runner.states
    return pages * core.page_bytes + (0 if states is None else states.buffer.shape[1])


def _copy_pages_to_host(
    core: EngineCore, pages: list[int], sizes: CacheBytesByRank | None
) -> tuple[np.ndarray, ...]:
    """Pages in RAM, as in ``SessionPages.data``."""
    if sizes is None:
        index = torch.tensor(pages, device=core.device)
        return tuple(_pages_as_host_bytes(each[index]) for each in core.model_runner.kv.tensors)
    with core.model_runner.translate_rank_errors():
        return gather_pages_from_ranks(core.model_runner, sizes, pages)


def _num_restorable_pages(core: EngineCore, keys: Seq[bytes]) -> int:
    """Pages of the longest prefix whose pages are cached, and the state behind it."""
    pool, states = core.scheduler.pool, core.scheduler.states
    count = num_resumable_pages(pool, keys, core.page_size, _group_windows(core))
    while states is not None and count:
        with_state = states.num_pages_before_snapshot(keys[:count])
        if with_state == count:
            break
        count = num_resumable_pages(pool, keys[:with_state], core.page_size, _group_windows(core))
    return count


def _copy_state_to_host(
    core: EngineCore, key: bytes, sizes: CacheBytesByRank | None
) -> np.ndarray | None:
    """The state behind the page with this key, in RAM; None if the model has none."""
    states, cache = core.scheduler.states, core.model_runner.states
    slot = None if states is None else states.snapshot_slot(key)
    if slot is None or cache is None:
        return None
    if sizes is None:
        return cache.buffer[slot].cpu().numpy().copy()
    with core.model_runner.translate_rank_errors():
        return gather_state(core.model_runner, sizes, slot)


def import_session(core: EngineCore, session: SessionPages, cache_salt: str) -> int:
    """Put pages into the prefix cache, where they may be evicted as any others.

    Args:
        core: between two steps, with the layout of the one that saved them.
        session: the pages.
        cache_salt: of the requests that will use them.

    Returns:
        The number of tokens that are cached now.

    Raises:
        UsageError: the engine has no prefix cache.
        RankError: another rank has ended.
        CapacityError: the free pages, or the slots of recurrent state, are too few.
    """
    _check_session_support(core)
    pool, windows = core.scheduler.pool, _group_windows(core)
    keys = core.input_processor.prompt_page_keys(
        session.tokens, cache_salt, core.page_size, session.spans
    )
    places = pages_to_save(len(keys), core.page_size, windows)
    group_keys = [page_group_key(keys[page], group) for group, page in places]
    if sum(pool.cached_page_for_key(key) is None for key in group_keys) > pool.num_available:
        raise CapacityError(
            f"the session needs {len(places)} pages of the KV cache, and {pool.num_available} are "
            "free; try again when fewer requests run, or raise --kv-cache-bytes"
        )
    sizes = _gather_cache_bytes_if_parallel(core)
    pages: list[tuple[int, int]] = []
    fresh: list[tuple[int, int]] = []  # (row of the data, page) of those that are not cached
    try:
        for row, (key, (group, position)) in enumerate(zip(group_keys, places, strict=True)):
            page = pool.cached_page_for_key(key)
            if page is None:
                page = pool.alloc_page(group)
                if page is None:
                    break
                fresh.append((row, page))
            else:
                pool.incref(page)
            pages.append((position, page))
        _write_pages(core, fresh, session.data, sizes)
        for row, page in fresh:
            pool.add_to_prefix_cache(page, group_keys[row])
        if session.state is not None:
            _restore_state_snapshot(core, keys[-1], session.state, sizes)
    finally:
        # last pages first, so that the beginning is evicted last
        for _, page in sorted(pages, reverse=True):
            pool.decref(page)
    return _num_restorable_pages(core, keys) * core.page_size


def _restore_state_snapshot(
    core: EngineCore, key: bytes, state: np.ndarray, sizes: CacheBytesByRank | None
) -> None:
    """Put a snapshot of recurrent state into the prefix cache, unless it is there."""
    states, cache = core.scheduler.states, core.model_runner.states
    assert states is not None, "the layout of the session says so"
    assert cache is not None, "slots belong to a cache"
    if states.snapshot_slot(key) is not None:
        return
    slot = states.insert_snapshot_slot(key)
    if slot is None:
        raise CapacityError(
            "the session needs a slot for its recurrent state, and none is free; try again when "
            "fewer requests run, or raise --state-cache-bytes"
        )
    if sizes is None:
        cache.buffer[slot].copy_(torch.from_numpy(state))
        return
    with core.model_runner.translate_rank_errors():
        scatter_state(core.model_runner, sizes, slot, state)


def _check_session_support(core: EngineCore) -> None:
    memory = core.model_runner.memory
    if memory is not None and memory.is_asleep:
        raise UsageError("the engine sleeps; wake it up first")
    has_cache = core.model_runner.kv.tensors or core.model_runner.states is not None
    if not has_cache or not core.config.enable_prefix_caching:
        raise UsageError("this engine has no prefix cache to save sessions from")


def _pages_as_host_bytes(pages: torch.Tensor) -> np.ndarray:
    """Pages [pages, …] as [pages, bytes] uint8 in RAM."""
    flat = pages.reshape(len(pages), -1).contiguous()
    return flat.view(torch.uint8).cpu().numpy()


def _write_pages(
    core: EngineCore,
    rows: Seq[tuple[int, int]],
    data: Seq[np.ndarray],
    sizes: CacheBytesByRank | None,
) -> None:
    """Write rows of the data into pages: (row, page)."""
    if sizes is None:
        for row, page in rows:
            _write_page(core, page, [each[row] for each in data])
        return
    picked = [row for row, _ in rows]
    with core.model_runner.translate_rank_errors():
        scatter_pages_to_ranks(
            core.model_runner, sizes, [page for _, page in rows], [each[picked] for each in data]
        )


def _write_page(core: EngineCore, page: int, data: Seq[np.ndarray]) -> None:
    for tensor, values in zip(core.model_runner.kv.tensors, data, strict=True):
        source = torch.from_numpy(np.ascontiguousarray(values)).view(tensor.dtype)
        tensor[page].copy_(source.view(tensor.shape[1:]))
