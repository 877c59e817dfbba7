"""Background work of a build: reading the next tensor, and hashing the checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from modelmill.checkpoint.open import Checkpoint
from modelmill.core.progress import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch(
    load: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[tuple[Item, Result]]:
    """Yield each item and ``load(item)``; the next one is loaded while the current one is used.

    At most two exist at a time if the caller drops one before it requests the next.
    """
    with ThreadPoolExecutor(1) as pool:
        coming: tuple[Item, Future[Result]] | None = None
        for item in items:
            following = item, pool.submit(load, item)
            if coming is not None:
                yield coming[0], coming[1].result()
            coming = following
        if coming is not None:
            yield coming[0], coming[1].result()


class BackgroundFingerprint:
    """Computes the sha256 of a checkpoint's files while its weights are read.

    ``stop`` must be called.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._stop_event, self._callbacks = threading.Event(), list[Progress]()
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(checkpoint.fingerprint, self._report)

    def result(self, on_progress: Progress | None) -> str:
        """Wait for the result; progress is reported from now on."""
        if on_progress is not None:
            self._callbacks.append(on_progress)
        return self._future.result()

    def stop(self) -> None:
        """Stop the thread if it has not finished."""
        self._stop_event.set()
        self._pool.shutdown()

    def _report(self, stage: str, done: int, total: int) -> None:
        if self._stop_event.is_set():
            raise InterruptedError("the build ended")
        for progress in self._callbacks:
            progress(stage, done, total)
