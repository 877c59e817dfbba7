"""Calls are separated from content however the text is cut; no delta is ever revoked."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modelmill.text.tool_parser import ToolCallDelta, collect_tool_calls, make_tool_parser
from modelmill.text.tool_prompts import (
    BARE_STYLE,
    DESCRIBED_STYLE,
    LISTED_STYLE,
    MARKED_STYLE,
    REACT_STYLE,
)

ONE = '<tool_call>\n{"name": "f", "arguments": {"x": "é</tool_call>"}}\n</tool_call>'
TWO = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
X1 = '{"x": 1}'
NUMBER = '<tool_call>{"name": "f", "arguments": 3}</tool_call>'
NAMES = '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'
LIST = f'[{{"name": "f", "arguments": {X1}}}, {{"name": "g", "arguments": {{}}}}]'
F = ("f", X1)
# style, text, content, calls
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (MARKED_STYLE, "plain text < and <tool \n", "plain text < and <tool \n", []),
    (MARKED_STYLE, ONE, "", [("f", '{"x": "é</tool_call>"}')]),
    (MARKED_STYLE, f"Let me see.\n{TWO}", "Let me see.", [("g", "{}")]),
    (MARKED_STYLE, f"{TWO}\n{ONE}", "", [("g", "{}"), ("f", '{"x": "é</tool_call>"}')]),
    (MARKED_STYLE, f"A {TWO} and {TWO} B\n", "A  and  B", [("g", "{}"), ("g", "{}")]),
    (MARKED_STYLE, f"{TWO}\n B", "B", [("g", "{}")]),
    (MARKED_STYLE, TWO.removesuffix("</tool_call>"), "", [("g", "{}")]),
    (MARKED_STYLE, TWO.removesuffix("ll>"), "", [("g", "{}")]),
    (MARKED_STYLE, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [F]),
    (MARKED_STYLE, '<tool_call>{"id": 7, "name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "",
    [F]),
    (MARKED_STYLE, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (MARKED_STYLE, '<tool_call>{"name": "f", "arguments": null, "t": 0.5}</tool_call>', "",
    [("f", "{}")]),
    (MARKED_STYLE, f"<tool_call>{LIST}</tool_call>", "", [F, ("g", "{}")]),
    # a brace that is missing, one too many, an end that never comes
    (MARKED_STYLE, f'<tool_call>{{"name": "f", "arguments": {X1}</tool_call>{TWO}', "",
        [F, ("g", "{}")]),
    (MARKED_STYLE, '<tool_call>{"name": "f", "arguments": {"x": 1</tool_call>.', ".",
    [("f", '{"x": 1')]),
    (MARKED_STYLE, f'<tool_call>{{"name": "f", "arguments": {X1}}}}}</tool_call>.', ".", [F]),
    (MARKED_STYLE, '<tool_call>{"name": "f", "arguments": {"x', "", [("f", '{"x')]),
    # no calls
    (MARKED_STYLE, "<tool_call>{broken}</tool_call>", "<tool_call>{broken}</tool_call>", []),
    (MARKED_STYLE, '<tool_call>{"name": "unknown"}</tool_call>',
    '<tool_call>{"name": ' '"unknown"}</tool_call>', []),
    (MARKED_STYLE, NUMBER, NUMBER, []),
    (MARKED_STYLE, NAMES, NAMES, []),
    (MARKED_STYLE, '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    (MARKED_STYLE, "<tool_call>\n</tool_call>", "<tool_call>\n</tool_call>", []),
    (MARKED_STYLE, f"<tool_call> <tool_call>{TWO}", "<tool_call> <tool_call>", [("g", "{}")]),
    (MARKED_STYLE, "<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
    (BARE_STYLE, f' {{"name": "f", "parameters": {X1}}}', "", [F]),
    (BARE_STYLE, f'{{"name": "f", "parameters": {X1}}}; {{"name": "g", "parameters": {{}}}}', "",
    [F, ("g", "{}")]),
    (BARE_STYLE, f'[{{"name": "f", "arguments": {X1}}},\n{{"name": "g", "arguments": {{}}}}]', "",
    [F, ("g", "{}")]),
    (BARE_STYLE, f'<|python_tag|>{{"name": "f", "parameters": {X1}}}', "", [F]),
    (BARE_STYLE, f'Sure.<|python_tag|>{{"type": "function", "name": "f", "parameters": {X1}}}',
    "Sure.", [F]),
    (BARE_STYLE, "<|python_tag|>f.call(x=1)", "", [F]),
    (BARE_STYLE, "<|python_tag|>f(x=[1, 'é'])\n", "", [("f", '{"x": [1, "é"]}')]),
    (BARE_STYLE, "<|python_tag|>print(f(x=1))", "<|python_tag|>print(f(x=1))", []),
    (BARE_STYLE, "<|python_tag|>f(1)", "<|python_tag|>f(1)", []),
    (BARE_STYLE, "<|python_tag|>f(x=g())", "<|python_tag|>f(x=g())", []),
    (BARE_STYLE, "<|python_tag|>f(**{})", "<|python_tag|>f(**{})", []),
    (BARE_STYLE, "<|python_tag|>" + "f(" * 5000, "<|python_tag|>" + "f(" * 5000, []),
    (BARE_STYLE, '{"name": "Bob", "age": 7}\n', '{"name": "Bob", "age": 7}\n', []),
    (BARE_STYLE, '{"name": "f"', '{"name": "f"', []),
    (BARE_STYLE, "Hello {", "Hello {", []),
    (BARE_STYLE, " \n", " \n", []),
    (BARE_STYLE, "", "", []),
    (LISTED_STYLE, f'[TOOL_CALLS] [{{"name": "f", "arguments": {X1}, "id": "abcdefghi"}}]', "",
    [F]),
    (LISTED_STYLE, f"[TOOL_CALLS]{LIST}", "", [F, ("g", "{}")]),
    (LISTED_STYLE, f"So: [TOOL_CALLS]f[ARGS]{X1}[TOOL_CALLS]g[CALL_ID]abc123XYZ[ARGS]{{}}", "So:",
    [F, ("g", "{}")]),
    (LISTED_STYLE, f"[TOOL_CALLS]f{X1}", "", [F]),
    (LISTED_STYLE, f"[TOOL_CALLS]h[ARGS]{X1}", f"[TOOL_CALLS]h[ARGS]{X1}", []),
    (LISTED_STYLE, "[TOOL_CALLS]" + "f" * 300, "[TOOL_CALLS]" + "f" * 300, []),
    (LISTED_STYLE, "[TOOL_CALLS] f [1]", "[TOOL_CALLS] f [1]", []),
    (LISTED_STYLE, "[TOOL_CALL", "[TOOL_CALL", []),
    (DESCRIBED_STYLE, f'{{"name": "f", "arguments": {X1}}}', "", [F]),
    (DESCRIBED_STYLE, TWO, "", [("g", "{}")]),
    (REACT_STYLE, "Hello there.", "Hello there.", []),
    (REACT_STYLE, "Thought: I know.\nFinal Answer: It is \n42.\nAction: f",
    "It is \n42.\nAction: f", []),
    (REACT_STYLE, f"Thought: I must ask.\nAction: f\nAction Input: {X1}\n", "I must ask.", [F]),
    (REACT_STYLE, f"Thought: Ask.\nAction: f\nAction Input: {X1}\nObservation: made up", "Ask.",
    [F]),
    (REACT_STYLE, "Action: f\nAction Input: {'x': 1}\n\nObs", "", [("f", "{'x': 1}")]),
    (REACT_STYLE, "Thought: a\nAction: g\nAction Input:\n", "a", [("g", "{}")]),
    (REACT_STYLE, "Thought: a\nAction: g\nAction Input: \nObservation:", "a", [("g", "{}")]),
    (REACT_STYLE, "Thought: a\nAction: h\nAction Input: {}",
    "Thought: a\nAction: h\nAction " "Input: {}", []),
    (REACT_STYLE, "Thought: a\nAction: none\nFinal Answer: 7", "7", []),
    (REACT_STYLE, "Thought: I do not\nknow", "Thought: I do not\nknow", []),
    (REACT_STYLE, f"Let me.\nAction: f\nAction Input: {X1}", "Let me.", [F]),
    (REACT_STYLE, "Let me.\nAction: be\nAction Input: {}", "Let me.\nAction: be\nAction Input: {}",
    []),
    (REACT_STYLE, "Final Answer: 7", "7", []),
    (REACT_STYLE, "Act", "Act", []),
    (REACT_STYLE, " Action: x", " Action: x", []),
]  # fmt: skip


def parse_pieces(
    style: str, text: str, sizes: list[int], **options: object
) -> tuple[str, list[tuple[str, str]], list[str | ToolCallDelta]]:
    """(content, calls, pieces) of a text that comes in pieces of these sizes, over and over."""
    parser, pieces, at, turn = (
        make_tool_parser(style, ["f", "g"], **options),
        list[str | ToolCallDelta](),
        0,
        0,
    )  # type: ignore[arg-type]
    while at < len(text):
        pieces += parser.push(text[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    pieces += parser.flush()
    content, calls = collect_tool_calls(pieces)
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
    MARKED_STYLE,
    BARE_STYLE,
    LISTED_STYLE,
    DESCRIBED_STYLE,
    REACT_STYLE,
]


@settings(deadline=None, max_examples=400)
@given(
    style=st.sampled_from(STYLES),
    text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    thinking=st.booleans(),
)
@example(
    style=REACT_STYLE, text="Action: f\nAction Input: 1 Observation:", sizes=[2], thinking=False
)
def test_streamed_or_whole_it_is_the_same(
    style: str, text: str, sizes: list[int], thinking: bool
) -> None:
    """For any text and any cut; a client may concatenate the deltas."""
    content, calls, pieces = parse_pieces(style, text, sizes, thinking=thinking)
    assert (content, calls) == parse_pieces(style, text, [10**6], thinking=thinking)[:2]
    if not calls and style != REACT_STYLE:
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
    MARKED_STYLE: lambda calls: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls),
    BARE_STYLE: "; ".join,
    LISTED_STYLE: lambda calls: f"[TOOL_CALLS] [{', '.join(calls)}]",
}


@settings(deadline=None, max_examples=100)
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
    """The name first, as soon as it is sure; then every piece at once."""
    parser = make_tool_parser(MARKED_STYLE, ["f"])
    assert parser.push('<tool_call>{"name": "f", "argu') == []
    (begun,) = parser.push('ments": {"x": ')
    assert isinstance(begun, ToolCallDelta)
    assert (begun.index, begun.name, begun.arguments) == (0, "f", '{"x": ')
    assert parser.push('"long') == [ToolCallDelta(0, '"long')]
    assert parser.push(' story"}}') == [ToolCallDelta(0, ' story"}')]
    assert parser.push("</tool_call>") == []
    assert parser.flush() == []


def test_content_is_not_held_longer_than_needed() -> None:
    parser = make_tool_parser(MARKED_STYLE, ["f"])
    assert parser.push("Well, 1 <") == ["Well, 1"]
    assert parser.push(" 2.") == [" < 2."]
    assert make_tool_parser(BARE_STYLE, ["f"]).push("It is") == ["It is"]
    assert make_tool_parser(REACT_STYLE, ["f"]).push("Hi the") == ["Hi the"]
    answer = make_tool_parser(REACT_STYLE, ["f"])
    assert answer.push("Thought: I know.\nFinal Answer: It") == ["It"]
    assert answer.push(" is") == [" is"]


def test_after_a_result_the_thought_goes_on() -> None:
    text = " I now know the final answer.\nFinal Answer: Sun"
    assert parse_pieces(REACT_STYLE, text, [4], thinking=True)[0] == "Sun"
    assert parse_pieces(REACT_STYLE, f" More.\nAction: f\nAction Input: {X1}", [4], thinking=True)[
        :2
    ] == (
        "More.",
        [F],
    )


@pytest.mark.parametrize("sizes", [[1], [10**6]], ids=str)
def test_one_call_at_most_where_that_is_asked(sizes: list[int]) -> None:
    assert parse_pieces(MARKED_STYLE, f"{TWO}{ONE}", sizes, max_calls=1)[:2] == ("", [("g", "{}")])


def test_ids() -> None:
    (part,) = make_tool_parser(LISTED_STYLE, ["f"]).push("[TOOL_CALLS]f[ARGS]{}")
    assert isinstance(part, ToolCallDelta)
    assert part.id
    assert len(part.id) == 9
    assert part.id.isalnum()


def test_a_lone_surrogate_becomes_text_that_can_be_sent() -> None:
    text = '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>'
    assert parse_pieces(MARKED_STYLE, text, [5])[1] == [("f", "�")]


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
