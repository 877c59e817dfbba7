"""Progress display: one line that is redrawn on a terminal or in a notebook.

A new stage replaces the previous one on the same line; the line is cleared at the end.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from modelmill.core import env
from modelmill.core.progress_callback import Progress

COMPILING_STAGE_PREFIX = "compiling kernels"
"""Prefix of the stages that compile: they take long, so plain output announces them as well."""
BAR_WIDTH = 24
"""Characters of a notebook's bar."""
REFRESH_SECONDS = 0.5
"""Seconds between two updates in a notebook."""
MIN_INTERVAL_SECONDS = 10.0
"""Minimum seconds between lines."""
INTERVAL_FRACTION = 0.1
"""Interval between lines as a share of the elapsed time: six minutes after one hour."""
MAX_TOTAL_SHOWN_AS_COUNT = 10_000
"""Totals up to here are counts of something, above they are bytes."""


class ProgressDisplay(Protocol):
    """Interface of a progress display."""

    def update(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage is: the ``Progress`` callback."""

    def close(self) -> None:
        """Remove the progress display from the terminal."""


@contextlib.contextmanager
def show_progress(
    label: str, *, enabled: bool | None = None, delay: float = 0.0
) -> Iterator[Progress]:
    """Show progress while the block runs; yields the progress callback.

    Args:
        label: Stage to show before the first report.
        enabled: None shows it on a terminal (stderr) and in a notebook; True elsewhere too; False
            nowhere. Where no line is drawn, only compilations are announced, in a plain line on
            stderr.
        delay: Seconds before anything is drawn, so that short work draws nothing.
    """
    if enabled is False:
        yield lambda *_: None
        return
    display = open_progress_display(label, delay, enabled=bool(enabled)) or CompileAnnouncer(
        sys.stderr.write
    )
    try:
        yield display.update
    finally:
        display.close()


def open_progress_display(
    label: str, delay: float = 0.0, *, enabled: bool = False
) -> ProgressDisplay | None:
    """Open a display for a notebook or a terminal; None if neither, or if plain output is set."""
    if in_notebook():
        return NotebookProgress(label, delay)
    if enabled or (sys.stderr.isatty() and not env.is_plain_output()):
        return TerminalProgress(label, delay)
    return None


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel; imports nothing."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return getattr(get() if get is not None else None, "kernel", None) is not None


class CompileAnnouncer:
    """For plain output: writes one line when a compilation starts, and nothing else."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._announced: set[str] = set()

    def update(self, stage: str, done: int, total: int) -> None:  # noqa: ARG002
        """Announce a stage once, if it is a compilation."""
        if stage.startswith(COMPILING_STAGE_PREFIX) and stage not in self._announced:
            self._announced.add(stage)
            self._write(f"modelmill: {stage}\n")

    def close(self) -> None:
        """Do nothing: there is no display to clear."""


class TerminalProgress:
    """A line on stderr: spinner, stage, bar, share, seconds."""

    def __init__(self, label: str, delay: float = 0.0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(BAR_WIDTH),
            TextColumn("{task.fields[share]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            # output to a pipe must not be drawn on the terminal
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._bars.add_task(label, total=None, share="")
        self._delayed = CancellableDelayedCall(self._bars.start, delay)

    def update(self, stage: str, done: int, total: int) -> None:
        """Show a stage; one with a total of 1 has no percentage, its bar only pulses."""
        counted = total > 1
        task = self._bars.tasks[0]
        task.total = total if counted else None
        share = f"{100 * done / total:3.0f} %" if counted else ""
        self._bars.update(
            self._task, description=stage, completed=done if counted else 0, share=share
        )
        # rich stops the clock and the spinner at the end of a stage; ours cover all stages
        task.finished_time = None

    def close(self) -> None:
        """Remove the progress line from the terminal."""
        self._delayed.cancel()
        if self._delayed.started:
            self._bars.stop()


class ProgressThread(ABC):
    """Stores the last report; a thread shows it, since minutes may pass between two reports."""

    def __init__(self, label: str) -> None:
        self._start_time = time.monotonic()
        self._stage, self._done, self._total = label, 0, 0
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._show_until_closed, name="progress", daemon=True
        )

    def update(self, stage: str, done: int, total: int) -> None:
        """Store the current progress."""
        self._stage, self._done, self._total = stage, done, total

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_time

    @abstractmethod
    def _show_until_closed(self) -> None:
        """Show the stored report from time to time, until ``_closed`` is set."""


class NotebookProgress(ProgressThread):
    """A cell output that is updated in place, at most twice a second; needs no widgets."""

    def __init__(self, label: str, delay: float = 0.0) -> None:
        super().__init__(label)
        self._display = importlib.import_module("IPython.display").display
        self._handle: Any = None
        self._delay = delay
        if delay <= 0:
            self._draw_progress_bar()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and clear the output."""
        super().close()
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)

    def _show_until_closed(self) -> None:
        pause = max(self._delay, REFRESH_SECONDS)
        while not self._closed.wait(pause):
            self._draw_progress_bar()
            pause = REFRESH_SECONDS

    def _draw_progress_bar(self) -> None:
        line = format_bar_line(self._stage, self._done, self._total, self.seconds)
        if self._handle is None:
            self._handle = self._display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": line}, raw=True)


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

    def _show_until_closed(self) -> None:
        while not self._closed.wait(seconds_until_next_line(self.seconds, self._every)):
            self._write_line(format_progress(self._stage, self._done, self._total, self.seconds))


def seconds_until_next_line(seconds: float, every: float = MIN_INTERVAL_SECONDS) -> float:
    """Return the seconds until the next line, ``seconds`` after the start."""
    return max(every, INTERVAL_FRACTION * seconds)


def format_progress(stage: str, done: float, total: float, seconds: float) -> str:
    """Format progress like 'quantizing layers: 7 of 32 done, 41 s'."""
    if total > MAX_TOTAL_SHOWN_AS_COUNT:
        stage += f": {100 * done / total:.0f} %"
    elif total > 1:
        stage += f": {done:.0f} of {total:.0f} done"
    return f"{stage}, {seconds:.0f} s"


class CancellableDelayedCall:
    """Calls ``start`` after ``delay`` seconds (0: immediately), unless it is cancelled before.

    Attributes:
        started: whether ``start`` was called.
    """

    def __init__(self, start: Callable[[], None], delay: float) -> None:
        self._timer: threading.Timer | None = None
        self.started = delay <= 0
        if self.started:
            start()
            return
        self._start = start
        self._timer = threading.Timer(delay, self._start_and_mark)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Prevent a later start; ``started`` does not change afterwards."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _start_and_mark(self) -> None:
        self._start()
        self.started = True


def format_bar_line(stage: str, done: float, total: float, seconds: float) -> str:
    """'weights ━━━━━━──────────────────  25 %, 7 s'; seconds only if ``total`` is at most 1."""
    if total <= 1:
        return f"{stage}, {seconds:.0f} s"
    share = min(max(done / total, 0.0), 1.0)
    filled = round(BAR_WIDTH * share)
    return (
        f"{stage} {'━' * filled}{'─' * (BAR_WIDTH - filled)} {100 * share:3.0f} %, {seconds:.0f} s"
    )
