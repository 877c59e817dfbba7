"""What the verbs print: results on stdout, everything said along the way on stderr.

With ``--json`` stdout is the JSON alone. Progress is drawn only where stderr is a terminal; what takes minutes tells of
it elsewhere in a line now and then.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from modelmill.core import env
from modelmill.progress import Announcer, TerminalLine, parse_report, reporter

Progress = Callable[..., None]
"""Called with (stage, done, total) or (done, total)."""


def emit_json(value: Any) -> None:
    """One JSON value on stdout; NaN and infinities become null, so that every reader can read it."""
    print(json.dumps(_finite(value), indent=1, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def note(text: str) -> None:
    """A remark for people, on stderr."""
    print(f"modelmill: {text}", file=sys.stderr)


def plain() -> bool:
    """Whether output is to be without colours and progress bars."""
    return env.plain()


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
    """A table on stdout; numbers stand right. Off a terminal it keeps its full width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, no_color=plain(), highlight=False)
    drawn = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(_number_like(row[index]) for row in rows)
        drawn.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*[_escape(shown(cell)) for cell in row])
    console.print(drawn)


def facts(pairs: Sequence[tuple[str, Any]], title: str | None = None) -> None:
    """Names and values below one another; values that are None are left out."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200, no_color=plain(), highlight=False)
    drawn = Table(
        title=title, box=box.SIMPLE, show_header=False, title_justify="left", title_style="bold", pad_edge=False
    )
    drawn.add_column(style="cyan", no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None:
            drawn.add_row(_escape(name), _escape(shown(value)))
    console.print(drawn)


def shown(value: Any) -> str:
    """A cell's text: numbers with what can be read of them."""
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


def _number_like(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


@contextlib.contextmanager
def progress(
    label: str, *, quiet: bool = False, lines: bool = False, every: float | None = None, delay: float = 0.0
) -> Iterator[Progress]:
    """A line that moves on stderr while the block runs, if stderr is a terminal; yields the function that moves it.

    lines: without a terminal (or plain) a line on stderr every ten seconds (or ``every``) and more, and one for each
    compilation. delay: seconds before a terminal's line is drawn.
    """
    if quiet or plain() or not sys.stderr.isatty():
        with _told_in_lines(label, every) if lines and not quiet else contextlib.nullcontext(lambda *_: None) as told:
            yield told
        return
    display = TerminalLine(label, delay)
    try:
        yield reporter(label, display)
    finally:
        display.close()


@contextlib.contextmanager
def _told_in_lines(label: str, every: float | None) -> Iterator[Progress]:
    from modelmill.cli.lines import Lines

    told, announcer = Lines(label, note, *(() if every is None else (every,))), Announcer(sys.stderr.write)

    def move(*given: Any) -> None:
        stage, numbers = parse_report(label, given)
        if len(numbers) >= 2:
            announcer.update(stage, *numbers[:2])
            told.tell(stage, *numbers[:2])

    try:
        yield move
    finally:
        told.end()
