"""A tensor-parallel group whose ranks are threads, to test sharding without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from modelmill.parallel.tp_group import TPGroup


class ThreadTPGroup(TPGroup):
    """One rank of several; ``table``: the values they exchange, by rank."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        self._table, self._barrier = table, barrier

    def _exchange(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait()
        values = list(self._table)
        self._barrier.wait()
        return values

    def all_reduce(self, x: torch.Tensor, *, captured: bool = False) -> torch.Tensor:
        return torch.stack(self._exchange(x.clone())).sum(0)

    def all_reduce_add_rms_norm(
        self, op: Any, x: torch.Tensor, residual: torch.Tensor, *more: Any, **_: Any
    ) -> Any:
        return op(self.all_reduce(x), residual, *more)

    def all_gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        parts = self._exchange(x)
        assert tuple(p.shape[1] for p in parts) == widths
        return torch.cat(parts, 1)


def run_on_ranks(size: int, work: Callable[[TPGroup], Any]) -> list[Any]:
    """What ``work`` returns on each of ``size`` ranks."""
    table: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadTPGroup(rank, size, table, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return results
