"""Answers that go on where the last message ends, with a template that opens the thinking."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.dialect_calls import MODEL, events, post
from tests.serve.service_thread import ServiceThread
from tests.serve.test_thinking_and_schemas import TEMPLATE

ASK = {"role": "user", "content": "x"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
MORE = {"continue_final_message": True, "add_generation_prompt": False}
THOUGHT, SAID = "Once upon a", "One day, a"


@pytest.fixture(scope="module")
def service(running: ServiceThread) -> Iterator[ServiceThread]:
    with running.other_template(TEMPLATE) as service:
        yield service


def begun(content: str = "", reasoning: str | None = None) -> list[dict[str, Any]]:
    thought = {} if reasoning is None else {"reasoning_content": reasoning}
    return [ASK, {"role": "assistant", "content": content, **thought}]


def prompt_of(service: ServiceThread, messages: list[dict[str, Any]]) -> str:
    text: str = post(service, "/apply-template", {"messages": messages, **MORE}).json["prompt"]
    return text


def chat(service: ServiceThread, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, **MORE, **GREEDY, **more}
    whole = post(service, "/v1/chat/completions", body).json
    message: dict[str, Any] = whole["choices"][0]["message"]
    deltas = [
        event["choices"][0]["delta"]
        for _, event in events(post(service, "/v1/chat/completions", {**body, "stream": True}).body)
    ]
    for key in ("content", "reasoning_content"):
        assert "".join(delta.get(key) or "" for delta in deltas) == message.get(key, "")
    return message


CASES = [
    (SAID, None, "<s>user\nx</s><s>assistant\nOne day, a"),
    ("", THOUGHT, "<s>user\nx</s><s>assistant\n<think>\nOnce upon a"),
    (SAID, THOUGHT, "<s>user\nx</s><s>assistant\n<think>\nOnce upon a\n</think>\n\nOne day, a"),
    ("", None, "<s>user\nx</s><s>assistant\n<think>\n"),
]


@pytest.mark.parametrize(("content", "reasoning", "prompt"), CASES, ids=range(len(CASES)))
def test_the_message_is_rendered_and_cut(
    service: ServiceThread, content: str, reasoning: str | None, prompt: str
) -> None:
    messages = begun(content, reasoning)
    assert prompt_of(service, messages) == prompt
    ids = post(service, "/tokenize", {"messages": messages, **MORE}).json["tokens"]
    body = {"messages": messages, **MORE, **GREEDY, "return_token_ids": True}
    answer = post(service, "/v1/chat/completions", body).json
    assert answer["prompt_token_ids"] == ids
    generated = answer["choices"][0]["token_ids"]
    same = post(service, "/v1/completions", {"prompt": ids, **GREEDY, "return_token_ids": True})
    assert same.json["choices"][0]["token_ids"] == generated


def test_the_rest_is_content_behind_content_and_thinking_behind_thinking(
    service: ServiceThread,
) -> None:
    for reasoning in (None, THOUGHT):
        message = chat(service, begun(SAID, reasoning))
        assert message["content"].strip()
        assert "reasoning_content" not in message
    thinking = chat(service, begun("", THOUGHT))
    assert thinking["content"] == ""
    assert thinking["reasoning_content"].startswith(" time")


def test_a_budget_counts_on(service: ServiceThread) -> None:
    spent = post(service, "/tokenize", {"prompt": THOUGHT, "add_special_tokens": False})
    count = spent.json["count"]
    message = chat(service, begun("", THOUGHT), thinking_token_budget=count + 2, max_tokens=40)
    assert 0 < len(message["reasoning_content"].split()) <= 2
    assert message["content"]
    message = chat(service, begun("", THOUGHT), thinking_token_budget=1, max_tokens=40)
    assert not message.get("reasoning_content", "").strip()
    assert message["content"]


def test_a_schema_holds_behind_begun_thinking(service: ServiceThread) -> None:
    constraint = {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}
    more = {"response_format": constraint, "thinking_token_budget": 12, "max_tokens": 60}
    message = chat(service, begun("", THOUGHT), **more)
    assert (message["content"].strip(), bool(message["reasoning_content"])) == ("7", True)


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("structured_outputs", {"structured_outputs": {"choice": ["a"]}}),
        ("grammar", {"grammar": 'root ::= "a"'}),
        (
            "tool_choice",
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_constraint_on_begun_content_is_refused_by_its_name(
    service: ServiceThread, field: str, more: dict[str, Any]
) -> None:
    body = {"model": "stories", "messages": begun(SAID), **MORE, **more}
    refused = service.post("/v1/chat/completions", body)
    assert refused.status == 400
    message = refused.json["error"]["message"]
    assert message.startswith(f"{field} cannot be combined with continue_final_message")


def test_allowed_tokens_hold_for_the_rest(service: ServiceThread) -> None:
    body = {"messages": begun(SAID), **MORE, **GREEDY, "return_token_ids": True}
    answer = post(service, "/v1/chat/completions", {**body, "allowed_token_ids": [300, 301]}).json
    assert set(answer["choices"][0]["token_ids"]) <= {300, 301}


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template"])
def test_a_prompt_that_cannot_go_on_is_refused(service: ServiceThread, path: str) -> None:
    for wrong in (
        {"messages": begun(SAID), "add_generation_prompt": True},
        {"messages": [ASK]},
        {"messages": begun(SAID)[1:]},
    ):
        body = {"model": "stories", "continue_final_message": True, **wrong}
        assert service.post(path, body).status == 400, wrong


def anthropic(service: ServiceThread, content: Any) -> Any:
    messages = [ASK, {"role": "assistant", "content": content}]
    body = {"messages": messages, "thinking": {"type": "enabled", "budget_tokens": 4096}, **GREEDY}
    return post(service, "/v1/messages", body).json["content"]


def test_a_prefill_of_anthropic_goes_on(service: ServiceThread) -> None:
    thinking = {"type": "thinking", "thinking": THOUGHT, "signature": ""}
    text_block = {"type": "text", "text": SAID}
    for blocks, reasoning in (([text_block], None), ([thinking, text_block], THOUGHT)):
        (block,) = anthropic(service, blocks)
        same = chat(service, begun(SAID, reasoning))
        assert (block["type"], block["text"]) == ("text", same["content"])
    block = anthropic(service, [thinking])[0]
    same = chat(service, begun("", THOUGHT))
    assert (block["type"], block["thinking"]) == ("thinking", same["reasoning_content"])
    assert block["thinking"].startswith(" time")
    body = {"model": "stories", "messages": [ASK, {"role": "assistant", "content": [thinking]}]}
    count = service.post("/v1/messages/count_tokens", body).json["input_tokens"]
    same_prompt = post(service, "/tokenize", {"messages": begun("", THOUGHT), **MORE})
    assert count == same_prompt.json["count"]


def test_a_last_message_of_the_assistant_begins_the_answer_of_ollama(
    service: ServiceThread,
) -> None:
    options = {"temperature": 0, "num_predict": 12}
    body = {"messages": begun(SAID), "options": options}
    whole = post(service, "/api/chat", {**body, "stream": False}).json
    assert whole["message"]["content"] == chat(service, begun(SAID))["content"]
    ids = post(service, "/tokenize", {"messages": begun(SAID), **MORE}).json["tokens"]
    assert whole["prompt_eval_count"] == len(ids)
    lines = post(service, "/api/chat", body).body.decode().splitlines()
    texts = [json.loads(line)["message"]["content"] for line in lines]
    assert "".join(texts) == whole["message"]["content"]


def test_errors_of_other_apis_do_not_name_a_field_that_they_do_not_have(
    service: ServiceThread,
) -> None:
    messages = begun(SAID)
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    for path, more, field in (
        ("/api/chat", {"format": "json"}, "format"),
        (
            "/v1/messages",
            {"max_tokens": 1, "output_config": {"format": schema}},
            "output_config.format",
        ),
    ):
        response = service.post(path, {"model": MODEL, "messages": messages, **more})
        assert response.status == 400
        assert response.error_message.startswith(
            f"{field} cannot be combined with a last message of the assistant:"
        )
