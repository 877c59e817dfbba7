"""Orders of roles that a template refuses: every text reaches it in an order that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.text.chat_format_loader import TemplateChatFormat
from modelmill.text.role_order import (
    JOINED_MESSAGES_WARNINGS,
    LATE_SYSTEM_WARNING,
    SYSTEM_IN_USER_MESSAGE_WARNING,
    iter_role_rearrangements,
)
from modelmill.text.template_process import TemplateRefusedMessages
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.text.conftest import hf_files, rendered

WRITES = "[{{ m.role }}]{{ m.content }}"
# as Qwen3.5's: a system message stands at the start
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}" + WRITES + "{% endfor %}"
)
# as Gemma 3's and Mistral's: one system message, then user and assistant in turn
ALTERNATES = (
    "{% set shift = 1 if messages[0].role == 'system' else 0 %}{% for m in messages %}"
    "{% if loop.index0 >= shift and (m.role == 'user') != ((loop.index0 - shift) % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + WRITES + "{% endfor %}"
)
# as Gemma 2's: no system message
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
TAKES_ALL = "{% for m in messages %}" + WRITES + "{% endfor %}"


def turns(*texts: str) -> list[dict[str, Any]]:
    """Messages from their roles' letters and texts, such as "u:Hi"."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in texts]


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (TAKES_ALL, turns("u:a", "s:b", "u:c"), "[user]a[system]b[user]c"),
        (SYSTEM_FIRST, turns("s:a", "u:b", "u:c"), "[system]a[user]b[user]c"),
        (SYSTEM_FIRST, turns("s:a", "d:b", "u:c"), "[system]a\n\nb[user]c"),
        (SYSTEM_FIRST, turns("u:a", "a:b", "s:c", "u:d"), "[user]a[assistant]b[user]c\n\nd"),
        # what Codex begins with
        (ALTERNATES, turns("s:a", "d:b", "u:c", "u:d"), "[system]a\n\nb[user]c\n\nd"),
        (ALTERNATES, turns("u:a", "u:b", "a:c", "u:d"), "[user]a\n\nb[assistant]c[user]d"),
        (NO_SYSTEM + ALTERNATES, turns("s:a", "u:b", "a:c"), "[user]a\n\nb[assistant]c"),
        (NO_SYSTEM + ALTERNATES, turns("s:a", "d:b", "u:c", "u:d"), "[user]a\n\nb\n\nc\n\nd"),
        # an answer that went on in a second message, as agents keep it
        (ALTERNATES, turns("u:a", "a:b", "a:c", "u:d"), "[user]a[assistant]b\n\nc[user]d"),
        (ALTERNATES, turns("u:a", "a:b", "a:c", "s:d"), "[user]a[assistant]b\n\nc[user]d"),
        # nothing is joined that the template takes
        (SYSTEM_FIRST, turns("u:a", "a:b", "a:c", "s:d"), "[user]a[assistant]b[assistant]c[user]d"),
        (
            NO_SYSTEM + TAKES_ALL,
            turns("s:a", "u:b", "a:c", "a:d"),
            "[user]a\n\nb[assistant]c[assistant]d",
        ),
    ],
)
def test_texts_reach_a_template_in_an_order_that_it_takes(
    template: str, messages: list[dict[str, Any]], text: str
) -> None:
    assert rendered(template, messages) == text


def test_what_cannot_be_ordered_is_refused_as_the_template_says() -> None:
    with pytest.raises(TemplateRefusedMessages, match="roles must alternate"):
        rendered(ALTERNATES, turns("a:a", "u:b"))


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_answers_are_joined_with_their_thinking_and_their_calls() -> None:
    other = {**CALL, "id": "call_2"}
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": "b", "reasoning_content": "why"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "c", "reasoning_content": "how", "tool_calls": [other]},
    ]
    [ordered] = iter_role_rearrangements([*turns("u:a"), *answers])
    assert ordered.messages[1:] == [
        {
            "role": "assistant",
            "content": "b\n\nc",
            "reasoning_content": "why\n\nhow",
            "tool_calls": [CALL, other],
        }
    ]
    assert ordered.changes == (JOINED_MESSAGES_WARNINGS["assistant"],)


@pytest.mark.parametrize(
    ("template", "messages", "changes"),
    [
        (ALTERNATES, turns("s:a", "u:b"), ()),
        (ALTERNATES, turns("u:a", "u:b"), (JOINED_MESSAGES_WARNINGS["user"],)),
        (ALTERNATES, turns("u:a", "a:b", "a:c", "u:d"), (JOINED_MESSAGES_WARNINGS["assistant"],)),
        (SYSTEM_FIRST, turns("s:a", "d:b", "u:c"), (JOINED_MESSAGES_WARNINGS["system"],)),
        (SYSTEM_FIRST, turns("u:a", "a:b", "s:c", "u:d"), (LATE_SYSTEM_WARNING,)),
        (
            ALTERNATES,
            turns("u:a", "a:b", "a:c", "s:d"),
            (LATE_SYSTEM_WARNING, JOINED_MESSAGES_WARNINGS["assistant"]),
        ),
        (NO_SYSTEM + ALTERNATES, turns("s:a", "u:b"), (SYSTEM_IN_USER_MESSAGE_WARNING,)),
    ],
)
def test_what_was_done_is_said(
    template: str, messages: list[dict[str, Any]], changes: tuple[str, ...]
) -> None:
    chat = TemplateChatFormat({"default": template}, load_tokenizer(hf_files()))
    try:
        assert chat.render_pieces(messages).changes == changes
        assert chat.render_pieces_with_prefill([*messages, *turns("a:e")]).changes == changes
    finally:
        chat.close()


def test_the_beginning_of_an_answer_stays_behind_joined_messages() -> None:
    chat = TemplateChatFormat({"default": ALTERNATES}, load_tokenizer(hf_files()))
    try:
        assert chat.render_with_prefill(turns("u:a", "u:b", "a:c")) == "[user]a\n\nb[assistant]c"
    finally:
        chat.close()


def test_parts_are_joined_as_parts_and_nothing_is_changed_in_place() -> None:
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [picture]},
    ]
    assert [each.messages for each in iter_role_rearrangements(messages)] == [
        [{"role": "user", "content": [{"type": "text", "text": "a"}, picture]}]
    ]
    assert messages[0]["content"] == "a"
    assert [*iter_role_rearrangements(turns("u:a", "a:b"))] == []
