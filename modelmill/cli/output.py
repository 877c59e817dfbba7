"""Output of the verbs: results on stdout, messages and progress on stderr.

With ``--json`` stdout holds only the JSON. Progress is drawn only if stderr is a terminal;
otherwise long stages print a line from time to time.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from modelmill.core import env
from modelmill.core.progress import Progress
from modelmill.progress import CompileAnnouncer, TerminalLine


def emit_json(value: Any) -> None:
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


def plain_output() -> bool:
    """Whether output must have no colors and no progress bars."""
    return env.plain_output()


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None
) -> None:
    """Print a table on stdout, numbers right-aligned; without a terminal it has full width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, no_color=plain_output(), highlight=False)
    drawn = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False
    )
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(_is_number(row[index]) for row in rows)
        drawn.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*[_escape(format_cell(cell)) for cell in row])
    console.print(drawn)


def print_facts(pairs: Sequence[tuple[str, Any]], title: str | None = None) -> None:
    """Print a name and a value per line; values that are None are omitted."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(
        width=None if sys.stdout.isatty() else 200, no_color=plain_output(), highlight=False
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
            drawn.add_row(_escape(name), _escape(format_cell(value)))
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


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _is_number(value: Any) -> bool:
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
    if quiet or plain_output() or not sys.stderr.isatty():
        with (
            _progress_in_lines(label, every)
            if lines and not quiet
            else contextlib.nullcontext(lambda *_: None) as on_progress
        ):
            yield on_progress
        return
    display = TerminalLine(label, delay)
    try:
        yield display.update
    finally:
        display.close()


@contextlib.contextmanager
def _progress_in_lines(label: str, every: float | None) -> Iterator[Progress]:
    from modelmill.cli.log_progress import LogProgress

    log_progress, announcer = (
        LogProgress(label, print_note, *(() if every is None else (every,))),
        CompileAnnouncer(sys.stderr.write),
    )

    def report(stage: str, done: int, total: int) -> None:
        announcer.update(stage, done, total)
        log_progress.update(stage, done, total)

    try:
        yield report
    finally:
        log_progress.close()
