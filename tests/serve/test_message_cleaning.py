"""Messages as clients bring them back: what is kept, and what would be lost."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.serve.message_cleaning import clean_messages
from tests.serve.service_thread import ServiceThread

HI = {"role": "user", "content": "Hi"}


def test_a_refusal_is_the_text_of_its_message() -> None:
    part = {"type": "refusal", "refusal": "No."}
    messages: list[dict[str, Any]] = [
        HI,
        {"role": "assistant", "content": [part]},
        {"role": "assistant", "content": None, "refusal": "No."},
    ]
    assert [each["content"] for each in clean_messages(messages)] == [
        "Hi",
        [{"type": "text", "text": "No."}],
        "No.",
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"messages": [HI, {"role": "assistant", "function_call": {"name": "f"}}]},
            "messages: function_call is not supported; send tool_calls",
        ),
        (
            {"messages": [HI], "tools": [{"type": "web_search"}]},
            "tools: number 0 has the type 'web_search', which this server does not have",
        ),
    ],
)
def test_what_would_be_lost_is_refused(
    running: ServiceThread, more: dict[str, Any], message: str
) -> None:
    refused = running.post("/v1/chat/completions", {"model": "stories", **more})
    assert refused.status == 400
    assert refused.json["error"]["message"].startswith(message)
    answer = {"role": "assistant", "content": "Yes", "function_call": None}
    body = {"model": "stories", "messages": [HI, answer, HI], "max_tokens": 1}
    assert running.post("/v1/chat/completions", body).status == 200
