"""Progress without a terminal: a plain line from time to time, so that a log shows activity."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MIN_INTERVAL_SECONDS = 10.0
"""Minimum seconds between lines."""
INTERVAL_FRACTION = 0.1
"""Interval between lines as a share of the elapsed time: six minutes after one hour."""
MAX_COUNT = 10_000
"""Totals up to here are counts of something, above they are bytes."""


class LogProgress:
    """Prints the last report from a thread: a stage may take minutes between two reports.

    A block that ends before ``every`` seconds prints nothing.
    """

    def __init__(
        self, label: str, write_line: Callable[[str], None], every: float = MIN_INTERVAL_SECONDS
    ) -> None:
        self._write_line = write_line
        self._every = every
        self._start_time = time.monotonic()
        self._stage = label
        self._done = 0.0
        self._total = 0.0
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._print, name="progress", daemon=True)
        self._thread.start()

    def update(self, stage: str, done: float, total: float) -> None:
        """Store the current progress."""
        self._stage = stage
        self._done = done
        self._total = total

    def close(self) -> None:
        """Stop the thread that writes the progress lines."""
        self._stop_event.set()
        self._thread.join()

    def _print(self) -> None:
        while not self._stop_event.wait(
            seconds_to_next_line(time.monotonic() - self._start_time, self._every)
        ):
            self._write_line(
                format_progress(
                    self._stage, self._done, self._total, time.monotonic() - self._start_time
                )
            )


def seconds_to_next_line(seconds: float, every: float = MIN_INTERVAL_SECONDS) -> float:
    """Return the seconds until the next line, ``seconds`` after the start."""
    return max(every, INTERVAL_FRACTION * seconds)


def format_progress(stage: str, done: float, total: float, seconds: float) -> str:
    """Format progress like 'quantizing layers: 7 of 32 done, 41 s'."""
    if total > MAX_COUNT:
        stage += f": {100 * done / total:.0f} %"
    elif total > 1:
        stage += f": {done:.0f} of {total:.0f} done"
    return f"{stage}, {seconds:.0f} s"
