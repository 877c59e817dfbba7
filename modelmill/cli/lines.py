"""Progress where there is no terminal: a plain line now and then, so that a log of minutes does not look dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

EVERY = 10.0
"""Seconds to the next line at least."""
SHARE = 0.1
"""Of the time gone by so far: an hour's build is told of every six minutes."""
COUNTED = 10_000
"""Totals up to here are counts of something, above they are bytes."""


class Lines:
    """Keeps what was told last and prints it from a thread of its own: a stage may take minutes between two reports.

    show: prints a line. A block that ends before ``every`` seconds prints nothing.
    """

    def __init__(self, label: str, show: Callable[[str], None], every: float = EVERY) -> None:
        self._show, self._every, self._began = show, every, time.monotonic()
        self._stage, self._done, self._total = label, 0.0, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print, name="progress", daemon=True)
        self._thread.start()

    def tell(self, stage: str, done: float, total: float) -> None:
        """What is done now."""
        self._stage, self._done, self._total = stage, done, total

    def end(self) -> None:
        """No more lines."""
        self._ended.set()
        self._thread.join()

    def _print(self) -> None:
        while not self._ended.wait(pause(time.monotonic() - self._began, self._every)):
            self._show(line(self._stage, self._done, self._total, time.monotonic() - self._began))


def pause(seconds: float, every: float = EVERY) -> float:
    """Until the next line, so many seconds after the beginning."""
    return max(every, SHARE * seconds)


def line(stage: str, done: float, total: float, seconds: float) -> str:
    """'quantizing layers: 7 of 32 done, 41 s'"""
    if total > COUNTED:
        stage += f": {100 * done / total:.0f} %"
    elif total > 1:
        stage += f": {done:.0f} of {total:.0f} done"
    return f"{stage}, {seconds:.0f} s"
