"""``python -m tools.chat_formats.page``: write the table of formats in docs/chat-formats.md.

A row comes from the format's file; the call is written by the same code that writes history.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall
from modelmill.text.answer_renderer import render_answer
from modelmill.text.chat_format_registry import list_chat_formats, load_chat_syntax
from modelmill.text.chat_syntax import ChatSyntax
from tools import generated_page
from tools.chat_formats.passed_runs import load_passed, passed_table

PAGE = Path("docs/chat-formats.md")
BEGIN, END = "<!-- formats: made by `make chat-formats` -->\n", "<!-- end of formats -->\n"
BEGIN_PASSED, END_PASSED = "<!-- passed runs: made by `make chat-formats` -->\n", "<!-- end -->\n"
EXAMPLE = ParsedToolCall("abc123XYZ", "f", '{"town": "Ulm", "days": 2}')


def table() -> str:
    """The table of formats."""
    rows = [
        "| format | models | a call of `f` with town “Ulm” and 2 days | thinking |",
        "|---|---|---|---|",
    ]
    rows += [_row(name, load_chat_syntax(name)) for name in list_chat_formats()]
    return "\n".join(rows) + "\n"


def _row(name: str, syntax: ChatSyntax) -> str:
    call = render_answer(syntax, ParsedAnswer("", (EXAMPLE,))).replace("\n", "⏎")
    thinking = "" if syntax.thinking is None else f"`{syntax.thinking.marks[0]}`"
    cells = (f"`{name}`", syntax.title, f"`` {call} ``", thinking)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def render(root: Path = generated_page.ROOT) -> dict[Path, str]:
    """The page by its path below the repository, with fresh tables."""
    text = (root / PAGE).read_text(encoding="utf-8")
    text = _replace_between(text, BEGIN, table(), END)
    return {PAGE: _replace_between(text, BEGIN_PASSED, passed_table(load_passed(root)), END_PASSED)}


def _replace_between(text: str, begin: str, new: str, end: str) -> str:
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return head + begin + new + end + tail


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return generated_page.run_pages(argv, __doc__, "chat-formats", render)


if __name__ == "__main__":
    sys.exit(main())
