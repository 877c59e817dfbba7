"""Any text in any format: nothing is raised, streamed = whole, and text without a call stays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, collect_answer
from modelmill.text.chat_format_registry import (
    list_chat_formats,
    load_chat_syntax,
    parser_marks_with_calls,
)
from modelmill.text.tool_call_reader import split_mark_parts
from tests.hypothesis_examples import examples
from tests.text.tool_schemas import object_schema
from tools.chat_formats.check_answers import is_json_prefix

TOOLS: dict[str, dict[str, Any] | None] = {
    "f": object_schema(x="string", n="number"),
    "now": None,
}
PIECES = (
    "f", "now", "g", "x", "n", "=", "(", ")", "[", "]", "{", "}", '"', "'", ":", ",", "\\", "\n",
    " ", "1", "-", "true", "null", "\\u", "\\ud83d", "é", "🎉", "\x00", "name", "arguments",
    "parameters", '{"name": "f", "arguments": {', '"}', "<", ">", "</", "<|", "|>", "/>",
    "Action: f\n", "Action Input: {", "Final Answer:",
)  # fmt: skip


def hostile_texts(name: str) -> st.SearchStrategy[list[str]]:
    """Lists of pieces: marks of the format, whole and cut, its syntax, and any text."""
    syntax = load_chat_syntax(name)
    marks = sorted({*parser_marks_with_calls(syntax, syntax.thinking), "<tool_call>"} - {""})
    parts = sorted({part for mark in marks for part in split_mark_parts(mark)})
    cut = [mark[: len(mark) // 2] for mark in marks]
    return st.lists(
        st.one_of(st.sampled_from([*marks, *parts, *cut]), st.sampled_from(PIECES), st.text()),
        max_size=24,
    )


def parse(name: str, pieces: list[str], thinks: bool, cut: bool) -> ParsedAnswer:
    syntax = load_chat_syntax(name)
    thinking = syntax.thinking
    parser = make_answer_parser(
        syntax, TOOLS, thinking=thinking, thinks=thinks and thinking is not None
    )
    parts = [each for piece in pieces for each in parser.push(piece)]
    return collect_answer([*parts, *parser.flush(cut)])


def meaning(answer: ParsedAnswer) -> tuple[Any, ...]:
    """What has to be equal; random ids need not."""
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.content, answer.reasoning, calls


@pytest.mark.parametrize("name", list_chat_formats())
@settings(max_examples=examples(60, 6), deadline=None)
@given(data=st.data())
def test_any_text_is_parsed_the_same_however_it_comes(name: str, data: st.DataObject) -> None:
    pieces = data.draw(hostile_texts(name))
    thinks, cut = data.draw(st.booleans()), data.draw(st.booleans())
    text = "".join(pieces)
    whole = parse(name, [text], thinks, cut)
    assert meaning(parse(name, pieces, thinks, cut)) == meaning(whole)
    assert meaning(parse(name, list(text), thinks, cut)) == meaning(whole)
    for call in whole.calls:
        assert call.name in TOOLS
        assert is_json_prefix(call.arguments), call


@pytest.mark.parametrize("name", [name for name in list_chat_formats() if name != "gpt_oss"])
@settings(max_examples=examples(60, 6), deadline=None)
@given(data=st.data())
def test_no_text_is_lost_where_nothing_is_a_call(name: str, data: st.DataObject) -> None:
    """But for the mark of a section, and marks that the format drops.

    gpt-oss's channels are no text: what they have is dropped or sorted by its channel.
    """
    text = "".join(data.draw(hostile_texts(name)))
    parser = make_answer_parser(load_chat_syntax(name), TOOLS)
    answer = collect_answer([*parser.push(text), *parser.flush()])
    if answer.calls:
        return
    assert without_marks(name, answer.content) == without_marks(name, text)


def without_marks(name: str, text: str) -> str:
    """Remove blanks, and the marks that are no text without a call."""
    syntax = load_chat_syntax(name)
    text = "".join(text.split())
    section = syntax.calls.section[0]
    first = () if syntax.calls.whole_marks else split_mark_parts(section)[:1]
    # a list without a call ends at its bracket
    empty = [section + "]"] if syntax.calls.section[1].startswith("]") else []
    for mark in (*empty, section, *first, *syntax.content, *syntax.dropped):
        text = text.replace("".join(mark.split()), "")
    return text


def test_an_empty_list_of_calls_shows_no_mark() -> None:
    answer = parse("apertus", ["<|tools_prefix|>[]<|tools_suffix|>hello"], False, False)
    assert not answer.calls
    assert "<|" not in answer.content
    assert answer.content.endswith("hello")


def test_arguments_that_end_inside_a_character_are_a_prefix() -> None:
    answer = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"x": "\\ud8'], False, True)
    assert answer.calls
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.calls[0].arguments)
    assert is_json_prefix(answer.calls[0].arguments)
