"""Calls are separated from content however the text is cut; no delta is ever revoked."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modelmill.text.answer_parser import AnswerParser, make_answer_parser
from modelmill.text.answer_pieces import (
    AnswerPiece,
    ToolCallDelta,
    collect_answer,
    collect_content_and_calls,
)
from modelmill.text.chat_format_registry import load_chat_syntax
from tests.hypothesis_examples import examples

HERMES, LLAMA, DESCRIBED = "hermes", "llama3_json", "described"
MISTRAL, MISTRAL_NAMED, REACT = "mistral_v1", "mistral_v13", "qwen_react"

ONE = '<tool_call>\n{"name": "f", "arguments": {"x": "é</tool_call>"}}\n</tool_call>'
TWO = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
X1 = '{"x": 1}'
NUMBER = '<tool_call>{"name": "f", "arguments": 3}</tool_call>'
NAMES = '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'
LIST = f'[{{"name": "f", "arguments": {X1}}}, {{"name": "g", "arguments": {{}}}}]'
F = ("f", X1)
# style, text, content, calls
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (HERMES, "plain text < and <tool \n", "plain text < and <tool \n", []),
    (HERMES, ONE, "", [("f", '{"x": "é</tool_call>"}')]),
    (HERMES, f"Let me see.\n{TWO}", "Let me see.", [("g", "{}")]),
    (HERMES, f"{TWO}\n{ONE}", "", [("g", "{}"), ("f", '{"x": "é</tool_call>"}')]),
    (HERMES, f"A {TWO} and {TWO} B\n", "A  and  B", [("g", "{}"), ("g", "{}")]),
    (HERMES, f"{TWO}\n B", "B", [("g", "{}")]),
    (HERMES, TWO.removesuffix("</tool_call>"), "", [("g", "{}")]),
    (HERMES, TWO.removesuffix("ll>"), "", [("g", "{}")]),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [F]),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "",
    [F]),
    # without arguments: a call only if the tool is known to require none
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    # arguments that do not even begin
    (HERMES, '<tool_call>{"name": "f", "arguments": {x: 1}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {x: 1}}</tool_call>', []),
    (LLAMA, f'{{"name": "f", "parameters": {{{{"name": "f", "parameters": {X1}}}',
    '{"name": "f", "parameters": {', [F]),
    (MISTRAL, f"[TOOL_CALLS] so: {LIST} it is", "[TOOL_CALLS] so: it is", [F, ("g", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null, "t": 0.5}</tool_call>', "",
    [("f", "{}")]),
    (HERMES, f"<tool_call>{LIST}</tool_call>", "", [F, ("g", "{}")]),
    # a brace that is missing, one too many, an end that never comes
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {X1}</tool_call>{TWO}', "",
        [F, ("g", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1</tool_call>.', ".",
    [("f", '{"x": 1}')]),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {X1}}}}}</tool_call>.', ".", [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x', "", [("f", "{}")]),
    # no calls
    (HERMES, "<tool_call>{broken}</tool_call>", "<tool_call>{broken}</tool_call>", []),
    (HERMES, '<tool_call>{"name": "unknown"}</tool_call>',
    '<tool_call>{"name": ' '"unknown"}</tool_call>', []),
    (HERMES, NUMBER, NUMBER, []),
    (HERMES, NAMES, NAMES, []),
    (HERMES, '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    (HERMES, "<tool_call>\n</tool_call>", "<tool_call>\n</tool_call>", []),
    (HERMES, f"<tool_call> <tool_call>{TWO}", "<tool_call> <tool_call>", [("g", "{}")]),
    (HERMES, "<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
    (LLAMA, f' {{"name": "f", "parameters": {X1}}}', "", [F]),
    (LLAMA, f'{{"name": "f", "parameters": {X1}}}; {{"name": "g", "parameters": {{}}}}', "",
    [F, ("g", "{}")]),
    (LLAMA, f'[{{"name": "f", "arguments": {X1}}},\n{{"name": "g", "arguments": {{}}}}]', "",
    [F, ("g", "{}")]),
    (LLAMA, f'<|python_tag|>{{"name": "f", "parameters": {X1}}}', "", [F]),
    (LLAMA, f'Sure.<|python_tag|>{{"type": "function", "name": "f", "parameters": {X1}}}',
    "Sure.", [F]),
    (LLAMA, "<|python_tag|>f.call(x=1)", "", [F]),
    (LLAMA, "<|python_tag|>f(x=[1, 'é'])\n", "", [("f", '{"x": [1, "é"]}')]),
    (LLAMA, "<|python_tag|>print(f(x=1))", "<|python_tag|>print(f(x=1))", []),
    (LLAMA, "<|python_tag|>f(1)", "<|python_tag|>f(1)", []),
    (LLAMA, "<|python_tag|>f(x=g())", "<|python_tag|>f(x=g())", []),
    (LLAMA, "<|python_tag|>f(**{})", "<|python_tag|>f(**{})", []),
    (LLAMA, "<|python_tag|>" + "f(" * 5000, "<|python_tag|>" + "f(" * 5000, []),
    (LLAMA, '{"name": "Bob", "age": 7}\n', '{"name": "Bob", "age": 7}\n', []),
    (LLAMA, '{"name": "f"', '{"name": "f"', []),
    (LLAMA, "Hello {", "Hello {", []),
    (LLAMA, " \n", " \n", []),
    (LLAMA, "", "", []),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "f", "arguments": {X1}, "id": "abcdefghi"}}]', "",
    [F]),
    (MISTRAL, f"[TOOL_CALLS]{LIST}", "", [F, ("g", "{}")]),
    (MISTRAL_NAMED, f"So: [TOOL_CALLS]f[ARGS]{X1}[TOOL_CALLS]g[CALL_ID]abc123XYZ[ARGS]{{}}", "So:",
    [F, ("g", "{}")]),
    (MISTRAL_NAMED, f"[TOOL_CALLS]f{X1}", "", [F]),
    (MISTRAL_NAMED, f"[TOOL_CALLS]h[ARGS]{X1}", f"[TOOL_CALLS]h[ARGS]{X1}", []),
    (MISTRAL, "[TOOL_CALLS]" + "f" * 300, "[TOOL_CALLS]" + "f" * 300, []),
    (MISTRAL_NAMED, "[TOOL_CALLS] f [1]", "[TOOL_CALLS] f [1]", []),
    (MISTRAL, "[TOOL_CALL", "[TOOL_CALL", []),
    (DESCRIBED, f'{{"name": "f", "arguments": {X1}}}', "", [F]),
    (DESCRIBED, TWO, "", [("g", "{}")]),
    (REACT, "Hello there.", "Hello there.", []),
    (REACT, "Thought: I know.\nFinal Answer: It is \n42.\nAction: f",
    "It is \n42.\nAction: f", []),
    (REACT, f"Thought: I must ask.\nAction: f\nAction Input: {X1}\n", "I must ask.", [F]),
    (REACT, f"Thought: Ask.\nAction: f\nAction Input: {X1}\nObservation: made up", "Ask.",
    [F]),
    (REACT, "Action: f\nAction Input: {'x': 1}\n\nObs", "", [("f", '{"x": 1}')]),
    (REACT, "Thought: a\nAction: g\nAction Input:\n", "a", [("g", "{}")]),
    (REACT, "Thought: a\nAction: g\nAction Input: \nObservation:", "a", [("g", "{}")]),
    (REACT, "Thought: a\nAction: h\nAction Input: {}",
    "Thought: a\nAction: h\nAction " "Input: {}", []),
    (REACT, "Thought: a\nAction: none\nFinal Answer: 7", "7", []),
    (REACT, "Thought: I do not\nknow", "Thought: I do not\nknow", []),
    (REACT, f"Let me.\nAction: f\nAction Input: {X1}", "Let me.", [F]),
    (REACT, "Let me.\nAction: be\nAction Input: {}", "Let me.\nAction: be\nAction Input: {}",
    []),
    (REACT, "Final Answer: 7", "7", []),
    (REACT, "Act", "Act", []),
    (REACT, " Action: x", " Action: x", []),
]  # fmt: skip


def make_parser(name: str, tools: list[str], **options: Any) -> AnswerParser:
    return make_answer_parser(load_chat_syntax(name), tools, **options)


def parse_pieces(
    style: str, text: str, sizes: list[int], **options: object
) -> tuple[str, list[tuple[str, str]], list[AnswerPiece]]:
    """(content, calls, pieces) of a text that comes in pieces of these sizes, over and over."""
    parser, pieces, at, turn = (
        make_parser(style, ["f", "g"], **options),
        list[AnswerPiece](),
        0,
        0,
    )  # type: ignore[arg-type]
    while at < len(text):
        pieces += parser.push(text[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    pieces += parser.flush()
    content, calls = collect_content_and_calls(pieces)
    assert len({call.id for call in calls}) == len(calls)
    return content, [(call.name, call.arguments) for call in calls], pieces


@pytest.mark.parametrize("place", range(len(CASES)))
@pytest.mark.parametrize("sizes", [[1], [10**6], [3, 1, 7]], ids=str)
def test_each_form(place: int, sizes: list[int]) -> None:
    style, text, content, calls = CASES[place]
    result = parse_pieces(style, text, sizes)
    assert result[1] == calls
    assert result[0] == content


PIECES = [
    "<tool_call>", "</tool_call>", "<tool", "<", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", "Thought:",
    "\nAction:", "\nAction Input:", "\nObservation:", "\nFinal Answer:", "Action:", "f", "g", "h",
    '"name"', '"f"',
    '"arguments"', ": ", ", ", "{", "}", "[", "]", '"', "\\", "\n", " ", "é", "\u2003", "null", "1",
    "(", ")", "=",
    '{"name": "f", "arguments": {', '{"name": "g"}', '"arguments": "{}"', ";", "Obs", "'",
]  # fmt: skip
STYLES = [
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    DESCRIBED,
    REACT,
]


@settings(deadline=None, max_examples=examples(400, 100))
@given(
    style=st.sampled_from(STYLES),
    text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    thinking=st.booleans(),
)
@example(style=REACT, text="Action: f\nAction Input: 1 Observation:", sizes=[2], thinking=False)
def test_streamed_or_whole_it_is_the_same(
    style: str, text: str, sizes: list[int], thinking: bool
) -> None:
    """For any text and any cut; a client may concatenate the deltas."""
    content, calls, pieces = parse_pieces(style, text, sizes, continues=thinking)
    assert (content, calls) == parse_pieces(style, text, [10**6], continues=thinking)[:2]
    if not calls and style != REACT:
        assert content == text
    num_calls = 0
    for piece in pieces:
        if isinstance(piece, str):
            assert piece
        elif piece.name is not None:
            assert piece.index == num_calls
            assert piece.id
            num_calls += 1
        else:
            assert piece.index == num_calls - 1
            assert piece.id is None
            assert piece.arguments
    for part, (name, arguments) in zip(
        [p for p in pieces if isinstance(p, ToolCallDelta) and p.name], calls
    ):
        assert part.name == name
        assert arguments.startswith(part.arguments)


ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda x: st.lists(x, max_size=3),
    ),
    max_size=3,
)
WRITE = {
    HERMES: lambda calls: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls),
    LLAMA: "; ".join,
    MISTRAL: lambda calls: f"[TOOL_CALLS] [{', '.join(calls)}]",
}


@settings(deadline=None, max_examples=examples(100, 30))
@given(
    style=st.sampled_from(sorted(WRITE)),
    expected=st.lists(st.tuples(st.sampled_from("fg"), ARGUMENTS), min_size=1, max_size=3),
    ascii=st.booleans(),
    size=st.integers(1, 11),
)
def test_every_object_arrives(
    style: str, expected: list[tuple[str, dict[str, object]]], ascii: bool, size: int
) -> None:
    written = [
        json.dumps({"name": name, "arguments": value}, ensure_ascii=ascii)
        for name, value in expected
    ]
    content, calls, _ = parse_pieces(style, WRITE[style](written), [size])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == expected


def test_arguments_come_as_they_are_written() -> None:
    """The name first, as soon as it is sure; a key with its value; then every piece at once."""
    parser = make_parser(HERMES, ["f"])
    assert parser.push('<tool_call>{"name": "f", "argu') == []
    (begun,) = parser.push('ments": {"x": ')
    assert isinstance(begun, ToolCallDelta)
    assert (begun.index, begun.name, begun.arguments) == (0, "f", "{")
    assert parser.push('"long') == [ToolCallDelta(0, '"x": "long')]
    assert parser.push(' story"}}') == [ToolCallDelta(0, ' story"}')]
    assert parser.push("</tool_call>") == []
    assert parser.flush() == []


def test_content_is_not_held_longer_than_needed() -> None:
    parser = make_parser(HERMES, ["f"])
    assert parser.push("Well, 1 <") == ["Well, 1"]
    assert parser.push(" 2.") == [" < 2."]
    assert make_parser(LLAMA, ["f"]).push("It is") == ["It is"]
    assert make_parser(REACT, ["f"]).push("Hi the") == ["Hi the"]
    answer = make_parser(REACT, ["f"])
    assert answer.push("Thought: I know.\nFinal Answer: It") == ["It"]
    assert answer.push(" is") == [" is"]


def test_after_a_result_the_thought_goes_on() -> None:
    text = " I now know the final answer.\nFinal Answer: Sun"
    assert parse_pieces(REACT, text, [4], continues=True)[0] == "Sun"
    assert parse_pieces(REACT, f" More.\nAction: f\nAction Input: {X1}", [4], continues=True)[
        :2
    ] == (
        "More.",
        [F],
    )


@pytest.mark.parametrize("sizes", [[1], [10**6]], ids=str)
def test_one_call_at_most_where_that_is_asked(sizes: list[int]) -> None:
    assert parse_pieces(HERMES, f"{TWO}{ONE}", sizes, max_calls=1)[:2] == ("", [("g", "{}")])


def test_ids() -> None:
    (part,) = make_parser(MISTRAL_NAMED, ["f"]).push("[TOOL_CALLS]f[ARGS]{}")
    assert isinstance(part, ToolCallDelta)
    assert part.id
    assert len(part.id) == 9
    assert part.id.isalnum()


def test_a_lone_surrogate_becomes_text_that_can_be_sent() -> None:
    arguments = json.dumps({"x": "\ud800"}, ensure_ascii=False)
    text = f'<tool_call>{{"name": "f", "arguments": {json.dumps(arguments)}}}</tool_call>'
    assert parse_pieces(HERMES, text, [5])[1] == [("f", '{"x": "�"}')]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "piece", ["<tool_call>", '<tool_call>{"x": "', "[TOOL_CALLS]", "\nAction: f", "{", " \n", "<"]
)
def test_time_is_linear_in_the_answer(style: str, piece: str) -> None:
    """60 thousand characters, a few at a time."""
    text = piece * (60_000 // len(piece))
    began = time.process_time()
    parse_pieces(style, text, [40])
    assert time.process_time() - began < 4


# forms beside a format's own that models write: (format, text, content, calls)
OTHER_FORMS = [
    (
        "lfm2",
        '<|tool_call_start|>[{"name": "f", "arguments": {"a": "x"}}]<|tool_call_end|> after',
        " after",
        [("f", '{"a": "x"}')],
    ),
    (
        "lfm2",
        '<|tool_call_start|>{"name": "f", "parameters": {}}<|tool_call_end|>',
        "",
        [("f", "{}")],
    ),
    ("lfm2", '<|tool_call_start|>{"no": 1}<|tool_call_end|> x', None, []),
    ("lfm2", "So. <|tool_call_start|>[]<|tool_call_end|>", "So. ", []),
    (
        "qwen3_coder",
        '<tool_call>\n<function=f>\n{"a": "</parameter>", "b": [1]}\n</function>\n</tool_call>',
        "",
        [("f", '{"a": "</parameter>", "b": [1]}')],
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n{}\n</function>\n</tool_call>", "", [("f", "{}")]),
    (
        "glm47",
        '<tool_call>f<arg_key>c</arg_key><arg_value>[{\\"k\\": \\"v\\"}]</arg_value></tool_call>',
        "",
        [("f", '{"c": [{"k": "v"}]}')],
    ),
    ("command_a", '<|START_ACTION|>[\n {"tool_name": "f"}\n]\n<|END_ACTION|>', "", [("f", "{}")]),
    ("olmo3", "<function_calls>f(a=1)\nf(a=2)</function_calls>", "",
     [("f", '{"a": 1}'), ("f", '{"a": 2}')]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), OTHER_FORMS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_other_forms_of_calls(
    name: str, text: str, content: str | None, calls: list[tuple[str, str]], size: int
) -> None:
    schema = {"properties": {"a": {}, "b": {"type": "array"}, "c": {"type": "array"}}}
    parser = make_answer_parser(load_chat_syntax(name), {"f": schema})
    pieces = [p for at in range(0, len(text), size) for p in parser.push(text[at : at + size])]
    answer = collect_answer([*pieces, *parser.flush()])
    assert answer.content.strip() == (text if content is None else content).strip()
    assert [(call.name, call.arguments) for call in answer.calls] == calls
