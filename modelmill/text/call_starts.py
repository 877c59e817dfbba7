"""How an answer of calls begins, where the alternative is content that a schema holds.

JSON never begins as a mark does. A call without a mark differs from it by the name of a tool and
what stands around the name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from modelmill.text.chat_syntax import CallSyntax, ChatSyntax
from modelmill.text.tool_call_reader import skip_whitespace, split_mark_parts

JSON_CONTENT_FIRST_CHARS = '{["-0123456789'
"""With one of these content of a schema begins where a thought may stand in its place."""
CallStartTexts = tuple[str, ...]
"""Texts that begin an answer of calls, in order; blanks may stand before each."""


def list_call_starts(syntax: ChatSyntax, names: Iterable[str]) -> list[CallStartTexts]:
    """Return all beginnings of an answer with a call of one of the functions."""
    calls = syntax.calls
    prefix = calls.section[0] + calls.call[0]
    if syntax.begun:
        return [(f"{name}{calls.name_end}",) for name in names]
    marks = [mark for mark in (*calls.openers, calls.code_mark) if mark]
    if calls.style == "pythonic":
        marks.append(calls.optional[0])
    if calls.whole_marks:
        marks.append((calls.section[0] or calls.call[0]).strip())
    elif not _is_unmarked(calls):
        marks.append(split_mark_parts(prefix)[0].rstrip("["))
    starts: list[CallStartTexts] = [(mark,) for mark in marks]
    if calls.style == "pythonic" and prefix == "[":
        starts += [(f"[{name}(",) for name in names]
    if is_unmarked_json(calls):
        starts += [start for name in names for start in unmarked_json_starts(calls, name)]
    return starts


def is_unmarked_json(calls: CallSyntax) -> bool:
    """Whether calls are JSON without a mark, as content of a schema is."""
    return calls.style == "json" and _is_unmarked(calls)


def unmarked_json_starts(calls: CallSyntax, name: str) -> list[CallStartTexts]:
    """Return how an answer begins with a call of a function, as JSON without a mark."""
    keys = json.dumps(calls.name_key), json.dumps(calls.arguments_key)
    call = ("{", keys[0], ":", json.dumps(name), ",", keys[1], ":", "{")
    return [call, ("[", *call)] if calls.section[0] else [call]


def _is_unmarked(calls: CallSyntax) -> bool:
    return calls.section[0] + calls.call[0] in ("", "[")


def match_call_start(text: str, start: CallStartTexts) -> bool | None:
    """Return whether a text begins as calls do; None if more of it is needed to tell."""
    at = 0
    for part in start:
        at = skip_whitespace(text, at)
        if not text.startswith(part, at):
            return None if part.startswith(text[at:]) else False
        at += len(part)
    return True
