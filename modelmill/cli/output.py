"""Output of the verbs: results on stdout, messages and progress on stderr.

With ``--json`` stdout holds only the JSON. Progress is drawn only if stderr is a terminal;
otherwise long stages print a line from time to time.

Both streams survive a closed pipe, so that a verb finishes with its own exit code: if the reader of
a pipe exits (``| head -1``), further output is dropped without an error. A full disk is an error,
reported once in one line. A stream that was closed before the start (``>&-``) drops all output.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from modelmill.core import env
from modelmill.core.errors import ModelmillError
from modelmill.core.progress_callback import Progress
from modelmill.progress_display import CompileAnnouncer, LogProgress, TerminalProgress


def print_json(value: Any) -> None:
    """Print one JSON value on stdout; NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(_replace_non_finite(value), indent=1, ensure_ascii=False))


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {str(key): _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_non_finite(item) for item in value]
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def print_note(text: str) -> None:
    """Print a note for people on stderr."""
    print(f"modelmill: {text}", file=sys.stderr)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None
) -> None:
    """Print a table on stdout, numbers right-aligned; without a terminal it has full width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, no_color=env.is_plain_output(), highlight=False)
    drawn = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False
    )
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(_is_number_or_none(row[index]) for row in rows)
        drawn.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*[_escape_rich_markup(format_cell(cell)) for cell in row])
    console.print(drawn)


def print_facts(pairs: Sequence[tuple[str, Any]], title: str | None = None) -> None:
    """Print a name and a value per line; values that are None are omitted."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(
        width=None if sys.stdout.isatty() else 200, no_color=env.is_plain_output(), highlight=False
    )
    drawn = Table(
        title=title,
        box=box.SIMPLE,
        show_header=False,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
    )
    drawn.add_column(style="cyan", no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None:
            drawn.add_row(_escape_rich_markup(name), _escape_rich_markup(format_cell(value)))
    console.print(drawn)


def format_cell(value: Any) -> str:
    """Format a cell: numbers with a readable number of digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10000 else str(value)
    return str(value)


def _escape_rich_markup(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _is_number_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


@contextlib.contextmanager
def show_progress(
    label: str,
    *,
    quiet: bool = False,
    lines: bool = False,
    every: float | None = None,
    delay: float = 0.0,
) -> Iterator[Progress]:
    """Show the progress of the block on stderr; yields the callback that reports it.

    Args:
        label: what is shown before the first stage.
        quiet: show nothing.
        lines: without a terminal (or with plain output) print a line at least every ten seconds
            (or ``every``), with growing intervals, and one per compilation.
        every: seconds between lines.
        delay: seconds before a terminal's line is drawn.
    """
    if quiet or env.is_plain_output() or not sys.stderr.isatty():
        with (
            _log_progress_lines(label, every)
            if lines and not quiet
            else contextlib.nullcontext(lambda *_: None) as on_progress
        ):
            yield on_progress
        return
    display = TerminalProgress(label, delay)
    try:
        yield display.update
    finally:
        display.close()


@contextlib.contextmanager
def _log_progress_lines(label: str, every: float | None) -> Iterator[Progress]:
    log_progress = LogProgress(label, print_note, *(() if every is None else (every,)))
    announcer = CompileAnnouncer(sys.stderr.write)

    def report(stage: str, done: int, total: int) -> None:
        announcer.update(stage, done, total)
        log_progress.update(stage, done, total)

    try:
        yield report
    finally:
        log_progress.close()


class BrokenPipeTolerantOutput(io.FileIO):
    """A file descriptor that is written until a write fails.

    Attributes:
        reader_gone: the reader is gone or a write failed; all further output is dropped.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.reader_gone = False
        self._name = name

    def write(self, data: Any, /) -> int:
        """Write or drop all of ``data``.

        Raises:
            ModelmillError: once, if the descriptor cannot be written (a full disk).
        """
        rest = memoryview(data).cast("B")
        while rest and not self.reader_gone:
            try:
                rest = rest[super().write(rest) or 0 :]
            except BrokenPipeError:
                self.reader_gone = True
            except OSError as error:
                self.reader_gone = True
                why = error.strerror or error
                raise ModelmillError(
                    f"cannot write to {self._name}: {why}; the output is incomplete"
                ) from None
        return memoryview(data).nbytes


@contextlib.contextmanager
def tolerate_closed_output() -> Iterator[None]:
    """Let stdout and stderr tolerate closed pipes within the context; no stream is missing.

    Bytes that are not UTF-8, and characters that the terminal lacks, become replacement characters
    instead of tracebacks.
    """
    with contextlib.ExitStack() as stack:
        previous_stdin = sys.stdin
        stack.callback(setattr, sys, "stdin", previous_stdin)
        if previous_stdin is None:
            sys.stdin = stack.enter_context(open(os.devnull, encoding="utf-8"))
        elif isinstance(previous_stdin, io.TextIOWrapper):
            previous_stdin.reconfigure(encoding="utf-8", errors="replace")
        stack.enter_context(contextlib.redirect_stdout(_safe_stream(sys.stdout, "stdout")))
        stack.enter_context(contextlib.redirect_stderr(_safe_stream(sys.stderr, "stderr")))
        try:
            yield
        finally:
            with contextlib.suppress(ModelmillError):
                sys.stderr.flush()


def is_stdout_reader_gone() -> bool:
    """Whether the reader of stdout is gone."""
    buffer = getattr(sys.stdout, "buffer", None)
    return bool(getattr(getattr(buffer, "raw", buffer), "reader_gone", False))


def _safe_stream(stream: TextIO | None, name: str) -> TextIO:
    """Return a stream that survives its reader; a stream without a descriptor is unchanged."""
    if stream is None:
        # occupies the free descriptor 1 or 2, so that no engine file gets it
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    try:
        descriptor = stream.fileno()
    except OSError:
        stream.reconfigure(errors="replace")
        return stream
    output = BrokenPipeTolerantOutput(descriptor, name)
    return io.TextIOWrapper(
        output if stream.write_through else io.BufferedWriter(output),  # as python -u does
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
