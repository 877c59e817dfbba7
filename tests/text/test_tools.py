"""Calls are told from content however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.text import tools

ONE = '<tool_call>\n{"name": "f", "arguments": {"x": "é<tool_call>"}}\n</tool_call>'
TWO = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
CASES: list[tuple[str, str, str, list[str]]] = [
    (tools.MARKED, "plain text < and <tool", "plain text < and <tool", []),
    (tools.MARKED, ONE, "", ["f"]),
    (tools.MARKED, f"Let me see.{ONE}", "Let me see.", ["f"]),
    (tools.MARKED, f"{ONE}\n{TWO}", "", ["f", "g"]),
    (tools.MARKED, ONE.removesuffix("</tool_call>"), "", ["f"]),
    (tools.MARKED, "<tool_call>{broken}</tool_call>", "<tool_call>{broken}</tool_call>", []),
    (tools.MARKED, '<tool_call>{"name": "unknown"}</tool_call>', '<tool_call>{"name": "unknown"}</tool_call>', []),
    (tools.MARKED, "<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
    (tools.BARE, ' {"name": "f", "parameters": {"x": 1}}', "", ["f"]),
    (tools.BARE, '{"name": "f"', '{"name": "f"', []),
    (tools.BARE, "Hello {", "Hello {", []),
    (tools.BARE, "", "", []),
]


@settings(deadline=None, max_examples=60)
@given(place=st.integers(0, len(CASES) - 1), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_any_pieces_give_the_same(place: int, cuts: list[int]) -> None:
    style, text, content, names = CASES[place]
    reader, found, calls, at, turn = tools.Reader(style, ["f", "g"]), "", [], 0, 0
    while at < len(text):
        piece, more = reader.push(text[at : at + cuts[turn % len(cuts)]])
        found, calls = found + piece, [*calls, *more]
        at, turn = at + cuts[turn % len(cuts)], turn + 1
    piece, more = reader.flush()
    found, calls = found + piece, [*calls, *more]
    assert [call.name for call in calls] == names
    assert found.strip() == content.strip()
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_a_format_without_tools_is_told_of_them_in_words() -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    found = tools.told(talk, [TOOL])
    assert found[0]["content"].startswith("Be brief.\n\n")
    assert '"name": "f"' in found[0]["content"]
    assert found[2] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    }
    assert found[3]["role"] == "user"
    assert "42" in found[3]["content"]
    assert tools.told(talk[1:2], [TOOL])[0]["role"] == "system"
    assert tools.told(talk[:2], []) == talk[:2]


@pytest.mark.parametrize(
    ("template", "style"),
    [("{{ messages }}", tools.TOLD), ("{% if tools %}<tool_call>", tools.MARKED), ("{% if tools %}{", tools.BARE)],
)
def test_the_template_says_how_calls_are_written(template: str, style: str) -> None:
    assert tools.style_of(template) == style
