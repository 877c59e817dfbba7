"""Text that UTF-8 cannot encode: the same error in every API, which names its place."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.service_thread import ServiceThread

HALF = "a\ud83d"
WRONG = "has an unpaired surrogate"


def message_list(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


PARTS = [{"type": "text", "text": HALF}]
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": message_list(HALF)}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": message_list(PARTS)}, "messages[0].content[0].text"),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {**message_list("x", "assistant")[0], "reasoning": HALF},
                *message_list("y"),
            ]
        },
        "messages[0].reasoning",
    ),
    ("/v1/messages", {"messages": message_list(HALF), "max_tokens": 1}, "messages[0].content"),
    (
        "/v1/messages",
        {"messages": message_list(PARTS), "max_tokens": 1},
        "messages[0].content[0].text",
    ),
    ("/v1/messages", {"messages": message_list("x"), "max_tokens": 1, "system": HALF}, "system"),
    ("/v1/responses", {"input": HALF}, "input"),
    ("/v1/responses", {"input": message_list(HALF)}, "input[0].content"),
    (
        "/v1/responses",
        {"input": message_list([{"type": "input_text", "text": HALF}])},
        "input[0].content[0].text",
    ),
    ("/v1/responses", {"input": "x", "instructions": HALF}, "instructions"),
    ("/api/chat", {"messages": message_list(HALF)}, "messages[0].content"),
    ("/api/generate", {"prompt": HALF}, "prompt"),
    ("/api/embed", {"input": ["x", HALF]}, "input[1]"),
    ("/v1/completions", {"prompt": HALF}, "prompt"),
    ("/v1/completions", {"prompt": ["x", HALF]}, "prompt[1]"),
    ("/v1/completions", {"prompt": "x", "suffix": HALF}, "suffix"),
    ("/v1/embeddings", {"input": HALF}, "input"),
    ("/v1/rerank", {"query": HALF, "documents": ["x"]}, "query"),
    ("/completion", {"prompt": [5, HALF]}, "prompt[1]"),
    ("/infill", {"input_prefix": HALF, "input_suffix": ""}, "input_prefix"),
    ("/tokenize", {"content": HALF}, "content"),
    ("/tokenize", {"messages": message_list(HALF)}, "messages[0].content"),
]


@pytest.mark.parametrize(("path", "body", "place"), CASES, ids=range(len(CASES)))
def test_the_error_names_the_place(
    running: ServiceThread, path: str, body: dict[str, Any], place: str
) -> None:
    response = running.post(path, {"model": "stories", **body})
    assert response.status == 400, response.body
    assert response.error_message == f"{place}: {WRONG}"


def test_a_whole_pair_is_a_character(running: ServiceThread) -> None:
    body = b'{"prompt":"\\ud83d\\ude00"}'
    headers = {"content-type": "application/json"}
    tokens = running.post("/tokenize", body, headers=headers).json["tokens"]
    assert tokens == running.post("/tokenize", {"prompt": "\U0001f600"}).json["tokens"]
