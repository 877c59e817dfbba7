"""What a build does beside itself: reading the next tensor while one is written, and the checkpoint's fingerprint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from modelmill.checkpoint.open import Checkpoint

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[str, int, int], None]


def ahead(make: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """Each item in order and what ``make`` makes of it, the next one made while the one before is used.

    Two are there at most, if the caller lets go of one before it asks for another.
    """
    with ThreadPoolExecutor(1) as pool:
        coming: tuple[Item, Future[Result]] | None = None
        for item in items:
            following = item, pool.submit(make, item)
            if coming is not None:
                yield coming[0], coming[1].result()
            coming = following
        if coming is not None:
            yield coming[0], coming[1].result()


class Fingerprint:
    """The sha256 of a checkpoint's files, made while its weights are read anyway. ``stop`` has to be called."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._stopped, self._progress = threading.Event(), list[Progress]()
        self._pool = ThreadPoolExecutor(1)
        self._made = self._pool.submit(checkpoint.fingerprint, self._told)

    def result(self, progress: Progress | None) -> str:
        """Wait for it; progress is told from now on."""
        if progress is not None:
            self._progress.append(progress)
        return self._made.result()

    def stop(self) -> None:
        """Give it up where it is not there yet."""
        self._stopped.set()
        self._pool.shutdown()

    def _told(self, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise InterruptedError("the build ended")
        for progress in self._progress:
            progress("fingerprint", done, total)
