"""What a prompt says of tools."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.text import tool_prompts
from modelmill.text.chat_format_registry import detect_chat_format

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}


def test_a_format_without_tools_describes_them_in_words() -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    messages = tool_prompts.convert_tool_conversation_to_text(conversation, [TOOL])
    assert messages[0]["content"].startswith("Be brief.\n\n")
    assert '"name": "f"' in messages[0]["content"]
    assert messages[2] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    }
    assert messages[3]["role"] == "user"
    assert "42" in messages[3]["content"]
    assert (
        tool_prompts.convert_tool_conversation_to_text(conversation[1:2], [TOOL])[0]["role"]
        == "system"
    )
    assert tool_prompts.convert_tool_conversation_to_text(conversation[:2], []) == conversation[:2]


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ messages }}", "described"),
        ("{% if tools %}<tool_call>", "hermes"),
        ("{% if tools %}{", "json"),
        ("{% if tools %}[TOOL_CALLS]", "mistral_v1"),
    ],
)
def test_the_template_says_how_calls_are_written(template: str, style: str) -> None:
    assert detect_chat_format(template) == style


def calls(*ids: str) -> list[dict[str, Any]]:
    return [
        {"id": id, "type": "function", "function": {"name": id, "arguments": "{}"}} for id in ids
    ]


PARALLEL: list[dict[str, Any]] = [
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": "Two.", "tool_calls": calls("a", "b")},
    {"role": "tool", "content": "B", "tool_call_id": "b"},
    {"role": "tool", "content": "A", "tool_call_id": "a"},
    {"role": "assistant", "content": "Done"},
]


def test_calls_made_at_once_are_written_one_by_one() -> None:
    conversation, _ = tool_prompts.prepare_tool_conversation("json", PARALLEL, [])
    actual = [
        (m["role"], m["content"], [c["id"] for c in m.get("tool_calls", ())]) for m in conversation
    ]
    assert actual == [
        ("user", "Go", []), ("assistant", "Two.", ["a"]), ("tool", "A", []),
        ("assistant", "", ["b"]),
        ("tool", "B", []), ("assistant", "Done", []),
    ]  # fmt: skip
    messages, _ = tool_prompts.prepare_tool_conversation("hermes", PARALLEL, [])
    assert len(messages) == len(PARALLEL)


def test_results_that_belong_to_no_call_are_kept() -> None:
    lost = {"role": "tool", "content": "C", "tool_call_id": "c"}
    messages = tool_prompts.split_parallel_calls([*PARALLEL[:3], lost])
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["B", "C"]


def test_mistral_gets_ids_of_nine_letters() -> None:
    messages, more = tool_prompts.prepare_tool_conversation("mistral_v1", PARALLEL, [TOOL])
    made = [call["id"] for call in messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[2:4]] == made[::-1]
    assert all(len(id) == 9 and id.isalnum() for id in made)
    assert more == {"tools": [TOOL]}
    fits = [{"role": "tool", "content": "", "tool_call_id": "abcDEF123"}]
    assert (
        tool_prompts.prepare_tool_conversation("mistral_v1", fits, [])[0][0]["tool_call_id"]
        == "abcDEF123"
    )


def test_what_has_nothing_to_do_with_tools_is_left_alone() -> None:
    odd = [{"role": "user", "content": [{"type": "picture"}]}]
    assert all(
        tool_prompts.prepare_tool_conversation(style, odd, []) == (odd, {})
        for style in (
            "described",
            "json",
            "qwen_react",
        )
    )
