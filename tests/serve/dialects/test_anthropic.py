"""/v1/messages: conversions of blocks, events in order, usage, and errors in the dialect's form."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.serve.app import make_app
from modelmill.serve.dialects.anthropic_answer import AnthropicBlocksBuilder, parse_tool_input
from modelmill.serve.dialects.anthropic_blocks import (
    strip_billing_headers,
    to_call_id,
    to_chat_messages,
)
from modelmill.serve.dialects.anthropic_schema import MessagesRequest
from modelmill.serve.service import Service, ServiceLimits
from tests.serve.asgi_client import Client
from tests.serve.dialect_calls import events, join_message
from tests.serve.service_thread import ServiceThread

HI = [{"role": "user", "content": "Hi"}]
ASK = {"model": "stories", "max_tokens": 5, "temperature": 0, "messages": HI}
HEADER = "x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch=1f2e3;"


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_blocks_become_chat_messages() -> None:
    marked = {**text("two"), "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [text("one"), marked]},
        {"role": "user", "content": "three"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("look"),
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}},
                {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sun", "is_error": False},
                {"type": "tool_result", "tool_use_id": "t2", "content": [text("a"), text("b")]},
                text("and?"),
            ],
        },
    ]
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}},
        {"id": "t2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    ]
    assert to_chat_messages([text("Be kind."), text("And brief.")], messages) == [
        {"role": "system", "content": [text("Be kind."), text("And brief.")]},
        {"role": "user", "content": [text("one"), text("two"), text("three")]},
        {
            "role": "assistant",
            "content": "look",
            "reasoning_content": "hm",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sun"},
        {"role": "tool", "tool_call_id": "t2", "content": [text("a"), text("b")]},
        {"role": "user", "content": "and?"},
    ]


def test_images_and_documents() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    document = {"type": "text", "media_type": "text/plain", "data": "body"}
    blocks = [
        {"type": "image", "source": source, "transformations": {"oversized_image": "downsize"}},
        {"type": "document", "source": document, "title": "T"},
    ]
    (message,) = to_chat_messages(None, [{"role": "user", "content": blocks}])
    url = {"url": "data:image/png;base64,QUJD"}
    assert message["content"] == [{"type": "image_url", "image_url": url}, text("T"), text("body")]


@pytest.mark.parametrize(
    ("system", "rest"),
    [
        (f"{HEADER}\n\nYou are", "You are"),
        (f"{HEADER}\n{HEADER}\nYou", "You"),
        (HEADER, ""),
        (f"You are\n{HEADER}", f"You are\n{HEADER}"),
        ("x-anthropic-other: 1\nYou", "x-anthropic-other: 1\nYou"),
    ],
)
def test_billing_headers_are_dropped_at_the_start_of_a_system_text(system: str, rest: str) -> None:
    assert strip_billing_headers(system) == rest
    chat = to_chat_messages([text(system)], HI)
    assert chat == ([{"role": "system", "content": rest}] if rest else []) + HI


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([{"role": "tool", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": [{"type": "video"}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "tool_use"}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [1]}], "messages[0].content[0]"),
    (
        [
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "video"}]}
                ],
            }
        ],
        "messages[0].content[0].content[0]",
    ),
    ([{"role": "user", "content": []}], "messages has no text"),
    (
        [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}],
        "messages[0].content[0]: an image source of type url needs its url",
    ),
    (
        [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "url", "url": "x"},
                        "transformations": {"oversized_image": "error"},
                    }
                ],
            }
        ],
        "messages[0].content[0].transformations.oversized_image",
    ),
    (
        [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}],
        "messages[0].content[0].source.type",
    ),
]


@pytest.mark.parametrize(("messages", "start"), BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
def test_errors_name_the_block(messages: Any, start: str) -> None:
    with pytest.raises(RequestError) as error:
        to_chat_messages(None, messages)
    assert str(error.value).startswith(start)


def test_blocks_of_an_answer() -> None:
    """Spaces before a call are no block; thinking, text and calls follow each other."""
    blocks = AnthropicBlocksBuilder(hold_spaces=True)
    made = [
        event
        for step in (
            blocks.add_thinking("hm"),
            blocks.add_text("\n"),
            blocks.add_text("Yes"),
            blocks.add_text("\n"),
            blocks.start_call("t1", "f"),
            blocks.add_arguments('{"a":'),
            blocks.add_arguments("1}"),
            blocks.add_text(" "),
            blocks.start_call("t2", "g"),
            blocks.add_arguments('{"b": [1, "cut'),
            blocks.flush_and_close_block(),
        )
        for event in step
    ]
    assert [block["type"] for block in blocks.content] == [
        "thinking", "text", "tool_use", "tool_use",
    ]  # fmt: skip
    assert blocks.content[1]["text"] == "\nYes\n"
    # clients keep thinking that has a signature, and streams give it as a delta of its own
    signatures = [e["delta"] for e in made if e.get("delta", {}).get("type") == "signature_delta"]
    assert [each["signature"] for each in signatures] == [blocks.content[0]["signature"]]
    assert blocks.content[0]["signature"]
    assert [block["input"] for block in blocks.content[2:]] == [{"a": 1}, {"b": [1]}]
    indexes = [event["index"] for event in made if event["type"] == "content_block_start"]
    assert indexes == [0, 1, 2, 3]
    assert parse_tool_input("") == {}
    assert parse_tool_input("[1]") == {}


@pytest.mark.parametrize("id", ["call_87a6f41c863f6821e68bc8eb", "a1b2c3d4e"])
def test_ids_of_calls_are_those_of_the_api_and_come_back(id: str) -> None:
    """As they were made: the prompt of the next turn, and what is cached of it, stay the same."""
    blocks = AnthropicBlocksBuilder(hold_spaces=False)
    steps = (
        *blocks.start_call(id, "f"),
        *blocks.add_arguments("{}"),
        *blocks.flush_and_close_block(),
    )
    (block,) = blocks.content
    assert steps[0]["content_block"]["id"] == block["id"] == f"toolu_{id.removeprefix('call_')}"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
    turns = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    answer, returned = to_chat_messages(None, [*HI, *turns])[1:]
    assert answer["tool_calls"][0]["id"] == returned["tool_call_id"] == id


def test_ids_of_another_servers_calls_stay_apart() -> None:
    ids = ["toolu_01A09q90qw90lq917835lq9", "toolu_01B", "call_01A", "x"]
    assert len({to_call_id(id) for id in ids}) == len(ids)


def test_the_id_of_a_request_by_the_name_of_the_api(running: ServiceThread) -> None:
    """Its client reads it as ``_request_id``; on paths of both APIs where its version is sent."""
    for body in (ASK, {**ASK, "stream": True}, {"model": "stories"}):
        headers = running.post("/v1/messages", body).headers
        assert headers["request-id"] == headers["x-request-id"]
    listed = running.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).headers
    assert listed["request-id"] == listed["x-request-id"]
    assert "request-id" not in running.get("/v1/models").headers


def test_thinking_that_is_omitted_comes_back_in_its_signature() -> None:
    blocks = AnthropicBlocksBuilder(hold_spaces=False, omits_thinking=True)
    steps = (blocks.add_thinking("Hm, "), blocks.add_thinking("é."), blocks.add_text("Yes"))
    made = [event for step in (*steps, blocks.flush_and_close_block()) for event in step]
    deltas = [event["delta"]["type"] for event in made if "delta" in event]
    assert deltas == ["signature_delta", "text_delta"]
    thinking, answer = blocks.content
    assert (thinking["thinking"], answer["text"]) == ("", "Yes")
    assert made[1]["delta"]["signature"] == thinking["signature"]
    turn = {"role": "assistant", "content": blocks.content}
    assert to_chat_messages(None, [*HI, turn, *HI])[1]["reasoning_content"] == "Hm, é."
    for signature, text_of in (("modelmill", ""), ("EqQBCg of another server", "")):
        block = {**thinking, "signature": signature}
        turn = {"role": "assistant", "content": [block, answer]}
        assert to_chat_messages(None, [*HI, turn, *HI])[1]["reasoning_content"] == text_of
    turn = {"role": "assistant", "content": [{**thinking, "signature": "mm1:damaged"}]}
    with pytest.raises(RequestError, match=r"^messages\[1\]\.content\[0\]\.signature is not of"):
        to_chat_messages(None, [*HI, turn, *HI])
    thinks = {"type": "enabled", "display": "omitted"}
    assert MessagesRequest.model_validate({**ASK, "thinking": thinks}).omits_thinking
    assert not MessagesRequest.model_validate(ASK).omits_thinking


def test_the_events_of_a_stream(running: ServiceThread) -> None:
    response = running.post("/v1/messages", {**ASK, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    names = [name for name, _ in events(response.body)]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    start = next(event for name, event in events(response.body) if name == "message_start")
    usage = start["message"]["usage"]
    assert usage["output_tokens"] == 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 0
    whole = running.post("/v1/messages", ASK).json
    streamed = join_message(response.body)
    assert streamed["content"] == whole["content"]
    assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("max_tokens", 5)


def test_cached_tokens_are_told_and_a_changing_header_keeps_them(running: ServiceThread) -> None:
    def usage(header: str) -> dict[str, int]:
        system = [text(header), text("The little dog liked to play in the sun. " * 3)]
        answer = running.post("/v1/messages", {**ASK, "system": system, "max_tokens": 1})
        assert answer.status == 200, answer.body
        return dict(answer.json["usage"])

    first, second = usage(HEADER), usage(HEADER.replace("1f2e3", "99999"))
    lengths = [each["input_tokens"] + each["cache_read_input_tokens"] for each in (first, second)]
    assert lengths[0] == lengths[1] > 100
    assert second["cache_read_input_tokens"] >= lengths[0] - 17
    assert second["cache_creation_input_tokens"] == 0


def test_a_stop_sequence_and_an_answer_that_has_begun(running: ServiceThread) -> None:
    whole = running.post("/v1/messages", {**ASK, "max_tokens": 20}).json["content"][0]["text"]
    stop = whole[4:7]
    answer = running.post("/v1/messages", {**ASK, "max_tokens": 20, "stop_sequences": [stop]}).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == whole[: whole.index(stop)]
    begun = [*HI, {"role": "assistant", "content": [text("Once upon a")]}]
    prefilled = running.post("/v1/messages", {**ASK, "messages": begun}).json
    same = running.post(
        "/v1/chat/completions",
        {
            **ASK,
            "messages": [*HI, {"role": "assistant", "content": "Once upon a"}],
            "continue_final_message": True,
        },
    ).json
    assert prefilled["content"][0]["text"] == same["choices"][0]["message"]["content"]
    assert prefilled["content"][0]["text"].startswith(" time")


def test_count_tokens_is_the_length_of_the_prompt(running: ServiceThread) -> None:
    body = {key: ASK[key] for key in ("model", "messages")}
    count = running.post("/v1/messages/count_tokens", {**body, "system": "Be kind."}).json
    usage = running.post("/v1/messages", {**ASK, "system": "Be kind."}).json["usage"]
    expected = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count == {"input_tokens": expected}
    long = [{"role": "user", "content": "a b " * 700}]
    assert running.post("/v1/messages/count_tokens", {**body, "messages": long}).status == 200
    assert running.post("/v1/messages", {**ASK, "messages": long}).status == 400


TOOL = {"name": "f", "input_schema": {"type": "object"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"temperature": 1.5}, "temperature"),
    ({"odd": 1}, "odd"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    (
        {
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
                },
            ]
        },
        "messages ends with a tool_use",
    ),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
        "tools[0].type: 'web_search_20250305' is a tool of Anthropic's API",
    ),
]


@pytest.mark.parametrize(("more", "start"), BAD, ids=range(len(BAD)))
def test_errors_have_the_form_of_the_dialect(
    running: ServiceThread, more: dict[str, Any], start: str
) -> None:
    response = running.post("/v1/messages", {**ASK, **more})
    assert response.status == 400, response.body
    body = response.json
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(start)
    assert body["request_id"] == response.headers["x-request-id"]


def test_keys_and_models_as_the_client_sends_them(running: ServiceThread) -> None:
    client = running.limited_client(api_keys=("secret",))
    refused = running.run(client.post("/v1/messages", ASK))
    assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
    headers = {"x-api-key": "wrong", "anthropic-version": "2023-06-01"}
    shut_out = running.run(client.get("/v1/models", headers=headers))
    assert (shut_out.status, shut_out.json["error"]["type"]) == (401, "authentication_error")
    assert shut_out.json["type"] == "error"
    headers["x-api-key"] = "secret"
    assert running.run(client.post("/v1/messages", ASK, headers=headers)).status == 200
    batch = running.run(client.post("/v1/messages/batches", {}, headers=headers))
    assert (batch.status, batch.json["error"]["type"]) == (404, "not_found_error")
    listed = running.run(client.get("/v1/models", headers=headers)).json
    assert [card["id"] for card in listed["data"]] == ["stories", "alias"]
    assert listed["data"][0]["type"] == "model"
    assert listed["data"][0]["lifecycle"] == "active"
    assert listed["data"][0]["max_input_tokens"] == 512
    unknown = running.run(client.get("/v1/models/nobody", headers=headers))
    assert (unknown.status, unknown.json["error"]["type"]) == (404, "not_found_error")
    missing = running.post("/v1/messages", {**ASK, "model": "nobody"})
    assert (missing.status, missing.json["error"]["type"]) == (404, "not_found_error")


def test_a_server_without_models_lists_none() -> None:
    service = Service({}, ServiceLimits())
    headers = {"anthropic-version": "2023-06-01"}
    listed = asyncio.run(Client(make_app(service)).get("/v1/models", headers=headers))
    service.close()
    assert listed.json == {"data": [], "has_more": False, "first_id": None, "last_id": None}


def test_fields_that_change_nothing_are_taken(running: ServiceThread) -> None:
    more: dict[str, Any] = {
        "metadata": {"user_id": "u"}, "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []}, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"}, "mcp_servers": [], "fallbacks": "default",
        "diagnostics": {"previous_message_id": None}, "billing_policy": {"bill_to": "self"},
        "speed": "fast", "of_a_later_version": None,
    }  # fmt: skip
    plain = running.post("/v1/messages", ASK).json["content"]
    assert running.post("/v1/messages", {**ASK, **more}).json["content"] == plain


def test_json_of_a_schema(running: ServiceThread) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    output = {"format": {"type": "json_schema", "schema": schema}}
    answer = running.post("/v1/messages", {**ASK, "max_tokens": 60, "output_config": output}).json
    assert json.loads(answer["content"][0]["text"])["a"] in (1, 2)


def test_what_a_search_found_is_text() -> None:
    search_result = {
        "type": "search_result", "source": "http://x", "title": "T", "content": [text("a")],
        "citations": {"enabled": True},
    }  # fmt: skip
    reference = {"type": "tool_reference", "tool_name": "f"}
    call: dict[str, Any] = {
        "type": "tool_use",
        "id": "t",
        "name": "s",
        "input": {},
        "toolset_name": None,
    }
    result = {"type": "tool_result", "tool_use_id": "t", "content": [search_result, reference]}
    chat = to_chat_messages(
        None,
        [
            {"role": "user", "content": [search_result]},
            {"role": "assistant", "content": [{**call, "of_a_later_version": None}]},
            {"role": "user", "content": [result]},
        ],
    )
    parts = [text("T"), text("http://x"), text("a")]
    assert [chat[0]["content"], chat[2]["content"]] == [parts, [*parts, text("f")]]


def test_a_strict_tool_is_strict() -> None:
    tools = [{**TOOL, "strict": True}, {**TOOL, "name": "g", "type": "custom"}]
    request = MessagesRequest.model_validate({**ASK, "tools": tools})
    assert [each["function"].get("strict") for each in request.to_chat_request().offered_tools] == [
        True,
        None,
    ]


def test_thinking_between_calls_is_no_thinking_before_the_answer() -> None:
    thinks_by_type = {"enabled": True, "adaptive": True, "disabled": False, "between_tools": False}
    for thinking_type, thinks in thinks_by_type.items():
        request = MessagesRequest.model_validate({**ASK, "thinking": {"type": thinking_type}})
        assert request.thinks is thinks


def test_the_end_of_the_context_is_not_the_limit_of_the_answer(running: ServiceThread) -> None:
    long = [{"role": "user", "content": "a b " * 110}]
    answer = running.post("/v1/messages", {**ASK, "messages": long, "max_tokens": 500}).json
    usage = answer["usage"]
    assert answer["stop_reason"] in ("end_turn", "model_context_window_exceeded")
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] <= 512
    stream = running.post(
        "/v1/messages", {**ASK, "messages": long, "max_tokens": 500, "stream": True}
    )
    assert join_message(stream.body)["stop_reason"] == answer["stop_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_read_the_prompt_into_the_cache(running: ServiceThread, stream: bool) -> None:
    """What Anthropic calls pre-warming."""
    messages = [{"role": "user", "content": f"Tom has a red ball and {stream} friends. " * 3}]
    ask = {**ASK, "messages": messages, "max_tokens": 0, "stream": stream}
    answer = running.post("/v1/messages", ask)
    message = join_message(answer.body) if stream else answer.json
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message["usage"]["output_tokens"] == 0
    usage = running.post("/v1/messages", {**ask, "max_tokens": 1, "stream": False}).json["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"]
