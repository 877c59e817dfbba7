"""An argument that its tool declares as a string is one, however a format writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall, collect_answer
from modelmill.text.answer_renderer import render_answer
from modelmill.text.chat_format_registry import list_chat_formats, load_chat_syntax

ATOMS = ("01234", "1.50", "1e5", "-0", "true", "007-x", "ulm")
"""Texts that a literal without quotes can be."""
TEXTS = (*ATOMS, "null", "[1, 2]", '{"a": 1}', '"quoted"', "1 2")
LITERAL_STYLES = ("pythonic", "named")
UNTYPED = [
    name
    for name in list_chat_formats()
    if not load_chat_syntax(name).calls.writes_arguments_as_json
]
PARAMETERS = {
    "type": "object",
    "properties": {
        "zip": {"type": "string"},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "integer"},
    },
    "$defs": {"unit": {"type": "string"}},
}
CASES = [
    (name, key, text)
    for name in UNTYPED
    for key in ("zip", "unit")
    for text in (ATOMS if load_chat_syntax(name).calls.style in LITERAL_STYLES else TEXTS)
]


def _parse(name: str, pieces: list[str], parameters: Mapping[str, object] = PARAMETERS) -> str:
    parser = make_answer_parser(load_chat_syntax(name), {"f": parameters})
    parsed = [each for piece in pieces for each in parser.push(piece)]
    return collect_answer([*parsed, *parser.flush()]).calls[0].arguments


def test_formats_with_untyped_arguments_are_audited() -> None:
    assert {"lfm2", "qwen3_coder", "glm45", "gemma4", "minimax_m3", "kimi_k3"} <= set(UNTYPED)


@pytest.mark.parametrize(("name", "key", "text"), CASES)
def test_text_without_quotes_is_a_declared_string(name: str, key: str, text: str) -> None:
    syntax = load_chat_syntax(name)
    arguments = json.dumps({key: text, "days": 2})
    call = ParsedToolCall("functions.f:0", "f", arguments)
    written = render_answer(syntax, ParsedAnswer("", (call,)))
    mark = syntax.calls.string_mark or '"'
    if syntax.calls.style in LITERAL_STYLES:
        assert f"{mark}{text}{mark}" in written
        written = written.replace(f"{mark}{text}{mark}", text)
    whole = _parse(name, [written])
    assert json.loads(whole) == {key: text, "days": 2}
    assert _parse(name, list(written)) == whole
    back = render_answer(syntax, ParsedAnswer("", (ParsedToolCall(call.id, "f", whole),)))
    assert _parse(name, [back]) == whole


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("f(zips=[01, '2', None])", {"zips": ["01", "2", None]}),
        ("f(to={'zip': 01, 'n': 02, \"z\\u0069p\": 3})", {"to": {"zip": "3", "n": 2}}),
        ("f(any=01)", {"any": 1}),
        ("f(either=1)", {"either": 1}),
        ("f(zips={01, 02})", {"zips": ["01", "02"]}),
        ("f(others={'x': 5})", {"others": {"x": "5"}}),
    ],
)
def test_strings_inside_of_python_values(written: str, expected: object) -> None:
    string = {"type": "string"}
    to = {"type": "object", "properties": {"zip": string, "n": {"type": "integer"}}}
    parameters: Mapping[str, object] = {
        "type": "object",
        "properties": {
            "zips": {"type": "array", "items": string},
            "to": to,
            "either": {"type": ["string", "integer"]},
            "others": {"type": "object", "additionalProperties": string},
        },
    }
    text = f"<|tool_call_start|>[{written}]<|tool_call_end|>"
    whole = _parse("lfm2", [text], parameters)
    assert json.loads(whole) == expected
    assert _parse("lfm2", list(text), parameters) == whole
