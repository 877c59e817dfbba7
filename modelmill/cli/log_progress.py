"""Progress without a terminal: a plain line from time to time, so that a log shows activity."""

from __future__ import annotations

from collections.abc import Callable

from modelmill.progress import ProgressThread

MIN_INTERVAL_SECONDS = 10.0
"""Minimum seconds between lines."""
INTERVAL_FRACTION = 0.1
"""Interval between lines as a share of the elapsed time: six minutes after one hour."""
MAX_COUNT = 10_000
"""Totals up to here are counts of something, above they are bytes."""


class LogProgress(ProgressThread):
    """Prints the last report.

    A block that ends before ``every`` seconds prints nothing.
    """

    def __init__(
        self, label: str, write_line: Callable[[str], None], every: float = MIN_INTERVAL_SECONDS
    ) -> None:
        super().__init__(label)
        self._write_line, self._every = write_line, every
        self._thread.start()

    def _show(self) -> None:
        while not self._closed.wait(seconds_to_next_line(self.seconds, self._every)):
            self._write_line(format_progress(self._stage, self._done, self._total, self.seconds))


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
