"""Strings of Gemma's calls whose marks a model leaves out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.text.answer_parser import MIN_TRUNCATED_MARK_CHARS, make_answer_parser
from modelmill.text.answer_pieces import ParsedToolCall, ToolCallDelta, collect_answer
from modelmill.text.chat_format_registry import load_chat_syntax

TOOLS: dict[str, Any] = {
    "find": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "rows": {"type": "integer"},
            "where": {"type": "object", "properties": {"river": {"type": "string"}}},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["place"],
    }
}
MARKS = {
    "gemma4": ("<|tool_call>", '<|"|>', "<tool_call|>"),
    "function_gemma": ("<start_function_call>", "<escape>", "<end_function_call>"),
}
# arguments with ~ for the mark of a string, and their values
CASES: list[tuple[str, dict[str, Any]]] = [
    ("place:old mill~", {"place": "old mill"}),
    ("place:old mill", {"place": "old mill"}),
    ("place:mill~,rows:3", {"place": "mill", "rows": 3}),
    ("place:mill,rows:3", {"place": "mill", "rows": 3}),
    ("rows:3,place:the old mill", {"rows": 3, "place": "the old mill"}),
    ("place:Ulm, Bavaria~,rows:3", {"place": "Ulm, Bavaria", "rows": 3}),
    ("place:Ulm, Bavaria", {"place": "Ulm, Bavaria"}),
    ("place:Ulm, Bavaria, rows: 3", {"place": "Ulm, Bavaria", "rows": 3}),
    ("place:open 10:30, or 11:00~", {"place": "open 10:30, or 11:00"}),
    ("place:look, https://mill.example/a~", {"place": "look, https://mill.example/a"}),
    ("place:1,000 mills~,rows:2", {"place": "1,000 mills", "rows": 2}),
    ("place:12 mills,rows:2", {"place": "12 mills", "rows": 2}),
    ("place:null mill~", {"place": "null mill"}),
    ("place:null", {"place": None}),
    ("place:0123,rows:2", {"place": "0123", "rows": 2}),
    ("place:f(a) { b, c }~,rows:2", {"place": "f(a) { b, c }", "rows": 2}),
    ("place:<b>mill</b>~", {"place": "<b>mill</b>"}),
    ("place:a \\n b~", {"place": "a \\n b"}),
    ("place:two\nlines ~", {"place": "two\nlines "}),
    ('place:say "mill"~', {"place": 'say "mill"'}),
    ("where:{river:Iller~},place:~mill~", {"where": {"river": "Iller"}, "place": "mill"}),
    ("where:{river:the Iller},place:mill~", {"where": {"river": "the Iller"}, "place": "mill"}),
    ("tags:[~a~,b~],rows:1", {"tags": ["a", "b"], "rows": 1}),
    ("tags:[old mill, new one],rows:1", {"tags": ["old mill", "new one"], "rows": 1}),
    ("other:word", {"other": "word"}),
    ("rows:5, other key:6", {"rows": 5, "other key": 6}),
    ("rows:true,place:nulls~", {"rows": True, "place": "nulls"}),
    ("rows:7,~place~:~mill~", {"rows": 7, "place": "mill"}),
]


def _call(name: str, arguments: str, end: str = "}") -> str:
    opening, mark, closing = MARKS[name]
    return f"{opening}call:find{{{arguments.replace('~', mark)}{end}{closing}"


def _read(name: str, pieces: list[str], cut: bool = False) -> tuple[list[ParsedToolCall], str]:
    parser = make_answer_parser(load_chat_syntax(name), TOOLS)
    parsed = [each for piece in pieces for each in parser.push(piece)]
    answer = collect_answer([*parsed, *parser.flush(cut=cut)])
    return list(answer.calls), answer.content


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize(("arguments", "values"), CASES)
def test_a_string_without_its_marks_is_whole(
    name: str, arguments: str, values: dict[str, Any]
) -> None:
    text = _call(name, arguments)
    (whole,), content = _read(name, [text])
    assert (json.loads(whole.arguments), content) == (values, "")
    for size in (1, 2, 5):
        (call,), content = _read(name, [text[at : at + size] for at in range(0, len(text), size)])
        assert (call.arguments, content) == (whole.arguments, "")


@pytest.mark.parametrize(("arguments", "values"), CASES)
def test_what_is_streamed_is_a_prefix(arguments: str, values: dict[str, Any]) -> None:
    text = _call("gemma4", arguments)
    (whole,), _ = _read("gemma4", [text])
    for size in range(len(text)):
        calls, content = _read("gemma4", [text[:size]], cut=True)
        assert not content or size < MIN_TRUNCATED_MARK_CHARS
        assert all(whole.arguments.startswith(call.arguments) for call in calls)


def test_a_string_without_marks_is_streamed_as_it_comes() -> None:
    parser = make_answer_parser(load_chat_syntax("gemma4"), TOOLS)
    parser.push("<|tool_call>call:find{place:the old")
    (piece,) = parser.push(" mill at")
    assert piece == ToolCallDelta(0, " mill at")


@pytest.mark.parametrize("end", ["", "~"])
def test_a_string_ends_at_the_mark_behind_the_call(end: str) -> None:
    (call,), content = _read("gemma4", [_call("gemma4", f"place:old mill{end}", end="")])
    assert (json.loads(call.arguments), content) == ({"place": "old mill"}, "")


def test_a_string_ends_with_the_answer() -> None:
    text = _call("gemma4", "place:old mill", end="").removesuffix("<tool_call|>")
    for pieces in ([text], list(text)):
        (call,), _ = _read("gemma4", pieces)
        assert json.loads(call.arguments) == {"place": "old mill"}
