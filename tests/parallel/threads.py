"""A mesh whose ranks are threads of this process: the arithmetic of splitting without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from modelmill.parallel.mesh import Mesh


class ThreadMesh(Mesh):
    """One rank of several; ``table`` is where all of them put what they exchange."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, size)
        self._table, self._barrier = table, barrier

    def _exchange(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found

    def sum(self, x: torch.Tensor, *, decode: bool = False) -> torch.Tensor:
        return torch.stack(self._exchange(x.clone())).sum(0)

    def add_rms_norm(self, plain: Any, x: torch.Tensor, residual: torch.Tensor, *more: Any, **_: Any) -> Any:
        return plain(self.sum(x), residual, *more)

    def gather(self, x: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        parts = self._exchange(x)
        assert tuple(p.shape[1] for p in parts) == widths
        return torch.cat(parts, 1)


def together(size: int, work: Callable[[Mesh], Any]) -> list[Any]:
    """What ``work`` returns on each of ``size`` ranks."""
    table: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=60)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadMesh(rank, size, table, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
