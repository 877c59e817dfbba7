"""A limit that ends the waiting for a mark holds for a whole answer, too."""

from __future__ import annotations

import json

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall, collect_answer
from modelmill.text.answer_renderer import render_answer
from modelmill.text.chat_format_registry import list_chat_formats, load_chat_syntax
from modelmill.text.harmony import MAX_HEADER_CHARS, MESSAGE_TOKEN
from modelmill.text.tool_call_reader import MAX_KEY_CHARS


def _parse(name: str, text: str, size: int, key: str) -> ParsedAnswer:
    tools = {"f": {"type": "object", "properties": {key: {"type": "string"}}}}
    parser = make_answer_parser(load_chat_syntax(name), tools)
    pieces = [
        each for at in range(0, len(text), size) for each in parser.push(text[at : at + size])
    ]
    return collect_answer([*pieces, *parser.flush()])


@pytest.mark.parametrize("name", list_chat_formats())
def test_a_long_key_is_read_in_pieces_as_at_once(name: str) -> None:
    syntax = load_chat_syntax(name)
    id = "functions.f:0" if syntax.calls.id_from_head else "abc123XYZ"
    for chars in (300, MAX_KEY_CHARS, MAX_KEY_CHARS + 1, 2 * MAX_KEY_CHARS):
        key = "k" * chars
        call = ParsedToolCall(id, "f", json.dumps({key: "v w"}))
        text = render_answer(syntax, ParsedAnswer("", (call,)), thinking=syntax.thinking)
        whole = _parse(name, text, len(text), key)
        for size in (5, 257):
            answer = _parse(name, text, size, key)
            assert [(each.name, each.arguments) for each in answer.calls] == [
                (each.name, each.arguments) for each in whole.calls
            ]
            assert answer.content == whole.content
        if chars == 300:
            assert [json.loads(each.arguments) for each in whole.calls] == [{key: "v w"}]


@pytest.mark.parametrize("chars", [0, MAX_HEADER_CHARS, MAX_HEADER_CHARS + 1])
def test_a_long_header_is_read_in_pieces_as_at_once(chars: int) -> None:
    begin = "<|channel|>commentary to=functions.f"
    header = f"{begin} {'x' * (chars - len(begin) - len(MESSAGE_TOKEN) - 1)}{MESSAGE_TOKEN}"
    assert len(header) == chars or not chars
    text = f"{header}{{}}<|call|>"
    expected = [("f", "{}")] if chars <= MAX_HEADER_CHARS else []
    for size in (1, 7, len(text)):
        calls = _parse("gpt_oss", text, size, "k").calls
        assert [(each.name, each.arguments) for each in calls] == expected
