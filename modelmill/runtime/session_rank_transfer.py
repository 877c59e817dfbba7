"""KV pages and recurrent state of several ranks, copied to rank 0 and back, bit for bit.

A rank has the KV heads of its shard, so a session of N ranks has N parts. Rank 0 sends a command;
then all ranks make the same collective call, on parts of at most ``_CHUNK_BYTES``. What rank 0
knows of the others are the bytes of a page and of a slot, since heads may be divided unevenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from modelmill.runtime.model_runner import ModelRunner
from modelmill.runtime.tp_worker_pool import (
    GATHER_PAGES_COMMAND,
    GATHER_SIZES_COMMAND,
    GATHER_STATE_COMMAND,
    SCATTER_PAGES_COMMAND,
    SCATTER_STATE_COMMAND,
    WorkerCommand,
)

_CHUNK_BYTES = 32 << 20  # of the widest rank; a GPU holds as much for every rank meanwhile


@dataclass(frozen=True)
class CacheBytesByRank:
    """Bytes that each rank keeps.

    Attributes:
        page_bytes: of a page on each rank.
        state_bytes: of a slot of recurrent state on each rank; zeros without any.
    """

    page_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]


def gather_cache_bytes_by_rank(runner: ModelRunner) -> CacheBytesByRank:
    """The sizes of all ranks; on rank 0, between two steps."""
    ranks = runner.tp_group.size
    _broadcast(runner, GATHER_SIZES_COMMAND, [])
    sizes = _gather_sizes(runner).view(ranks, 2).tolist()
    return CacheBytesByRank(tuple(each[0] for each in sizes), tuple(each[1] for each in sizes))


def gather_pages_from_ranks(
    runner: ModelRunner, sizes: CacheBytesByRank, pages: Seq[int]
) -> tuple[np.ndarray, ...]:
    """Pages of all ranks, [pages, bytes of a page] uint8 each, in RAM."""
    if not any(sizes.page_bytes):  # a model without attention: its pages take no memory
        return tuple(np.empty((len(pages), 0), np.uint8) for _ in sizes.page_bytes)
    parts = []
    for chunk in _page_chunks(pages, sizes):
        _broadcast(runner, GATHER_PAGES_COMMAND, [*sizes.page_bytes, *chunk])
        parts.append(_gather_pages(runner, sizes.page_bytes, chunk).cpu().numpy())
    return _split_by_rank(np.concatenate(parts), sizes.page_bytes)


def scatter_pages_to_ranks(
    runner: ModelRunner, sizes: CacheBytesByRank, pages: Seq[int], data: Seq[np.ndarray]
) -> None:
    """Write pages on all ranks.

    Args:
        runner: of rank 0.
        sizes: of all ranks.
        pages: to write.
        data: as of ``gather_pages_from_ranks``.
    """
    start = 0
    for chunk in _page_chunks(pages, sizes) if any(sizes.page_bytes) else ():
        rows = slice(start, start + len(chunk))
        start += len(chunk)
        _broadcast(runner, SCATTER_PAGES_COMMAND, [*sizes.page_bytes, *chunk])
        values = np.concatenate([each[rows] for each in data], axis=1)
        _scatter_pages(runner, sizes.page_bytes, chunk, values)


def gather_state(runner: ModelRunner, sizes: CacheBytesByRank, slot: int) -> np.ndarray:
    """The states of a slot, of one rank after another [bytes] uint8, in RAM."""
    _broadcast(runner, GATHER_STATE_COMMAND, [*sizes.state_bytes, slot])
    return _gather_state(runner, sizes.state_bytes, slot).cpu().numpy().reshape(-1)


def scatter_state(
    runner: ModelRunner, sizes: CacheBytesByRank, slot: int, state: np.ndarray
) -> None:
    """Write the states of a slot on all ranks."""
    _broadcast(runner, SCATTER_STATE_COMMAND, [*sizes.state_bytes, slot])
    _scatter_state(runner, sizes.state_bytes, slot, state)


@torch.inference_mode()
def run_session_command(runner: ModelRunner, command: str, words: Seq[int]) -> None:
    """On ranks above 0: take part in what rank 0 does after it has sent ``command``.

    Args:
        runner: of this rank.
        command: one of ``tp_worker_pool.SESSION_COMMANDS``.
        words: that follow it: the bytes of each rank, then the pages or the slot.
    """
    widths, rest = tuple(words[: runner.tp_group.size]), list(words[runner.tp_group.size :])
    if command == GATHER_SIZES_COMMAND:
        _gather_sizes(runner)
    elif command == GATHER_PAGES_COMMAND:
        _gather_pages(runner, widths, rest)
    elif command == SCATTER_PAGES_COMMAND:
        _scatter_pages(runner, widths, rest, None)
    elif command == GATHER_STATE_COMMAND:
        _gather_state(runner, widths, rest[0])
    else:
        assert command == SCATTER_STATE_COMMAND
        _scatter_state(runner, widths, rest[0], None)


def _broadcast(runner: ModelRunner, command: str, words: Seq[int]) -> None:
    assert runner.tp_workers is not None, "only rank 0 of several has workers"
    payload = np.array(words, dtype=np.int64)
    runner.tp_workers.broadcast(WorkerCommand(command, len(payload)), payload.data.cast("B"))


def _page_chunks(pages: Seq[int], sizes: CacheBytesByRank) -> Iterator[list[int]]:
    """The pages in parts that take little memory."""
    count = max(1, _CHUNK_BYTES // max(max(sizes.page_bytes), 1))
    for first in range(0, len(pages), count):
        yield list(pages[first : first + count])


def _gather_sizes(runner: ModelRunner) -> torch.Tensor:
    """(page bytes, state bytes) of one rank after another, on each rank."""
    page_bytes = sum(each[0].nbytes for each in runner.kv.tensors)
    state_bytes = 0 if runner.states is None else runner.states.buffer.shape[1]
    own = torch.tensor([[page_bytes, state_bytes]], dtype=torch.int64, device=runner.device)
    return runner.tp_group.all_gather(own, (2,) * runner.tp_group.size)


def _gather_pages(runner: ModelRunner, widths: tuple[int, ...], pages: Seq[int]) -> torch.Tensor:
    """Pages of one rank beside those of another [pages, bytes] uint8, on each rank."""
    index = torch.tensor(pages, dtype=torch.int64, device=runner.device)
    own = [_as_bytes(each)[index] for each in runner.kv.tensors]
    return runner.tp_group.all_gather(torch.cat(own, dim=1), widths)


def _scatter_pages(
    runner: ModelRunner, widths: tuple[int, ...], pages: Seq[int], values: np.ndarray | None
) -> None:
    """Write this rank's columns of rank 0's ``values`` [pages, bytes of all ranks]."""
    columns = _scatter_columns(runner, widths, len(pages), values)
    index = torch.tensor(pages, dtype=torch.int64, device=runner.device)
    start = 0
    for tensor in runner.kv.tensors:
        width = tensor[0].nbytes
        _as_bytes(tensor)[index] = columns[:, start : start + width]
        start += width


def _gather_state(runner: ModelRunner, widths: tuple[int, ...], slot: int) -> torch.Tensor:
    assert runner.states is not None, "rank 0 has recurrent state, so every rank has"
    return runner.tp_group.all_gather(runner.states.buffer[slot : slot + 1], widths)


def _scatter_state(
    runner: ModelRunner, widths: tuple[int, ...], slot: int, state: np.ndarray | None
) -> None:
    assert runner.states is not None, "rank 0 has recurrent state, so every rank has"
    values = None if state is None else state.reshape(1, -1)
    runner.states.buffer[slot].copy_(_scatter_columns(runner, widths, 1, values)[0])


def _scatter_columns(
    runner: ModelRunner, widths: tuple[int, ...], rows: int, values: np.ndarray | None
) -> torch.Tensor:
    """This rank's columns of rank 0's ``values`` [rows, bytes of all ranks]; None elsewhere."""
    if values is None:
        everything = torch.empty((rows, sum(widths)), dtype=torch.uint8, device=runner.device)
    else:
        everything = torch.from_numpy(np.array(values)).to(runner.device)
    everything = runner.tp_group.broadcast(everything)
    first = sum(widths[: runner.tp_group.rank])
    return everything[:, first : first + widths[runner.tp_group.rank]]


def _as_bytes(pages: torch.Tensor) -> torch.Tensor:
    """A view of pages [pages, …] as [pages, bytes]."""
    return pages.view(len(pages), -1).view(torch.uint8)


def _split_by_rank(values: np.ndarray, widths: Seq[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.split(values, np.cumsum(widths)[:-1], axis=1))
