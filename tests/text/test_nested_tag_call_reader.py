"""Calls of nested tags: types from the schema, mistakes of models, answers that are cut off."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, collect_answer
from modelmill.text.chat_format_registry import load_chat_syntax

TOOLS: dict[str, dict[str, Any] | None] = {
    "f": {
        "type": "object",
        "properties": {
            "x": {"type": "string"},
            "n": {"type": "integer"},
            "list": {"type": "array", "items": {"type": "integer"}},
            "where": {"type": "object", "properties": {"x": {"type": "string"}}},
            "maybe": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            "free": {"type": "object"},
        },
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "id": {"type": "integer"},
                    "next": {"$ref": "#/$defs/node"},
                },
            }
        },
    },
    "now": None,
}


def marked(text: str) -> str:
    """Put the token before every tag."""
    return text.replace("<", "]<]minimax[>[<")


def parse(text: str, size: int, cut: bool = False) -> ParsedAnswer:
    syntax = load_chat_syntax("minimax_m3")
    parser = make_answer_parser(syntax, TOOLS, thinking=syntax.thinking)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [part for piece in pieces for part in parser.push(piece)]
    return collect_answer([*parts, *parser.flush(cut)])


def in_call(arguments: str) -> str:
    return marked(f'<tool_call>\n<invoke name="f">{arguments}</invoke>\n</tool_call>')


# tags inside a call, and its arguments
ARGUMENTS = [
    ("", {}),
    ("<x>1</x><n>018</n>", {"x": "1", "n": 18}),
    ("<x> a\n</x>\n<n> 2 </n>\n", {"x": " a\n", "n": 2}),
    ("<n>two</n>", {"n": "two"}),
    ("<list><item>1</item><item>2</item></list>", {"list": [1, 2]}),
    ("<list><number>1</number></list>", {"list": [1]}),
    ("<list></list><where></where>", {"list": [], "where": {}}),
    ("<list>[1, 2]</list>", {"list": [1, 2]}),
    ("<where><x>5</x><y>6</y></where>", {"where": {"x": "5", "y": "6"}}),
    ("<maybe>null</maybe>", {"maybe": None}),
    ("<maybe><id>1</id><next><id>2</id></next></maybe>", {"maybe": {"id": 1, "next": {"id": 2}}}),
    # nothing of it is declared: a tag that comes again, or items, make a list
    ("<free><a>1</a><a>2</a><b><item>3</item></b></free>", {"free": {"a": ["1", "2"], "b": ["3"]}}),
    ("<new>1</new>", {"new": "1"}),
    ("<new><k>1</k></new>", {"new": {"k": "1"}}),
    # closing tags that are missing, that match nothing, or that stand elsewhere
    ("<n>1", {"n": 1}),
    ("<x>a", {"x": "a"}),
    ("<where><x>a</where><n>1</n>", {"where": {"x": "a"}, "n": 1}),
    ("<n>1</other></n></n>", {"n": 1}),
    # a wrong name closes the innermost tag, as MiniMax asks of providers
    ("<x>a</y><n>1</n>", {"x": "a", "n": 1}),
    ("<x>a</y></x><n>1</n>", {"x": "a", "n": 1}),
    ("<x>a</x></y><n>1</n>", {"x": "a", "n": 1}),
    ("<n>1</other><x>a</x>", {"n": 1, "x": "a"}),
    ("<where><x>5</z><y>6</y></where>", {"where": {"x": "5", "y": "6"}}),
    ("<where><x>5</x></z><y>6</y></where>", {"where": {"x": "5", "y": "6"}}),
    ("<where><x>5</x><y></where><n>1</n>", {"where": {"x": "5", "y": ""}, "n": 1}),
]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("tags", "arguments"), ARGUMENTS)
def test_tags_become_what_the_schema_declares(
    tags: str, arguments: dict[str, Any], size: int
) -> None:
    answer = parse(in_call(tags), size)
    assert [json.loads(call.arguments) for call in answer.calls] == [arguments]
    assert not answer.content


@pytest.mark.parametrize("size", [1, 1000])
def test_a_string_keeps_what_is_no_tag_of_its_own(size: int) -> None:
    value = '"]] \\ ' + marked("<b>c</b> < >") + "]<]minimax[>[ ]<]mini"
    answer = parse(in_call("<x>{}</x>").format(value), size)
    assert json.loads(answer.calls[0].arguments) == {"x": value}


# text with short tags, content, names of the calls
TEXTS = [
    ('so <tool_call>\n<invoke name="now"></invoke>\n</tool_call> ok', "so  ok", ["now"]),
    ('<invoke name="now"></invoke>', "", ["now"]),
    ('<tool_call><invoke name="now"></invoke><invoke name="f"></invoke></tool_call>'
     '<tool_call><invoke name="now"></invoke></tool_call>', "", ["now", "f", "now"]),
    ('<tool_call><invoke name="now"><invoke name="f"></invoke>', "", ["now", "f"]),
    ('<tool_call><invoke name="now"></tool_call>', "", ["now"]),
    ('<tool_call><invoke name="now"><n>1', "", ["now"]),
    ("</mm:think>hi", "hi", []),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(("text", "content", "names"), TEXTS)
def test_calls_stand_in_a_section_or_alone(
    text: str, content: str, names: list[str], size: int
) -> None:
    answer = parse(marked(text).replace(marked("</mm:"), "</mm:"), size)
    assert [call.name for call in answer.calls] == names
    assert answer.content == content


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "text", ['<tool_call><invoke name="g"></invoke></tool_call>', "<tool_call>", "<x>1</x>"]
)
def test_what_is_no_call_stays(text: str, size: int) -> None:
    answer = parse(marked(text), size)
    assert not answer.calls
    assert answer.content == marked(text)


def test_a_call_that_a_limit_cuts_off_is_a_begin_of_the_whole() -> None:
    text = in_call("<x>ab</x><n>12</n><list><item>1</item></list>")
    whole = parse(text, 1000).calls[0].arguments
    begins = {""}
    for end in range(3, len(text)):  # fewer characters of a mark may be text
        answer = parse(text[:end], 5, cut=True)
        assert not answer.content
        begins |= {call.arguments for call in answer.calls}
    assert all(whole.startswith(each) for each in begins)
    assert {'{"x": "a', '{"x": "ab", "n": 12', whole} <= begins
