"""/v1/responses: the same text as a chat, typed events in order, items of every kind, and each
refusal.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.serve.response_items import ResponseItemsBuilder
from modelmill.serve.responses_schema import items_to_messages
from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ReasoningDelta, ToolCallDelta
from modelmill.text.chat_format_registry import load_chat_syntax
from tests.hypothesis_examples import examples
from tests.serve.service_thread import ServiceThread

pytestmark = pytest.mark.usefixtures("brief_tools")

GREEDY = {"model": "stories", "temperature": 0, "max_output_tokens": 24}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def ask(running: ServiceThread, status: int = 200, **body: Any) -> Any:
    response = running.post("/v1/responses", {**GREEDY, **body})
    assert response.status == status, response.body
    return response.json


def stream(running: ServiceThread, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; checks their framing and numbers."""
    response = running.post("/v1/responses", {**GREEDY, "stream": True, **body})
    assert response.status == 200, response.body
    blocks = response.body.decode().removesuffix("\n\n").split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def chat(running: ServiceThread, messages: list[Any], **body: Any) -> Any:
    request_body = {
        "model": "stories",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 24,
        **body,
    }
    response = running.post("/v1/chat/completions", request_body)
    assert response.status == 200, response.body
    return response.json["choices"][0]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


SAME: list[tuple[Any, Any]] = [
    ({"input": "Tell me a story"}, [{"role": "user", "content": "Tell me a story"}]),
    (
        {"input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief"},
        [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
    ),
    (
        {
            "input": [
                {
                    "type": "message",
                    "role": "developer",
                    "content": [{"type": "input_text", "text": "Be kind"}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "One"},
                        {"type": "input_text", "text": "2"},
                    ],
                },
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [
                        {"type": "output_text", "text": "Yes", "annotations": [], "logprobs": []}
                    ],
                },
                {"type": "reasoning", "summary": [], "id": "rs_1"},
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "weather",
                    "arguments": '{"city": "Rome"}',
                },
                {
                    "type": "function_call",
                    "call_id": "c2",
                    "name": "weather",
                    "arguments": "{}",
                    "status": "completed",
                },
                {"type": "function_call_output", "call_id": "c1", "output": "sun"},
                {
                    "type": "function_call_output",
                    "call_id": "c2",
                    "output": [{"type": "input_text", "text": "rain"}],
                },
            ]
        },
        [
            {"role": "developer", "content": "Be kind"},
            {"role": "user", "content": "One\n2"},
            {
                "role": "assistant",
                "content": "Yes",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                    },
                    {
                        "id": "c2",
                        "type": "function",
                        "function": {"name": "weather", "arguments": "{}"},
                    },
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
            {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        ],
    ),
]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("input", "messages"), SAME, ids=["text", "instructions", "items"])
def test_the_text_is_that_of_a_chat_whole_and_streamed(
    running: ServiceThread, input: Any, messages: Any, options: Any
) -> None:
    expected = chat(running, messages, **options)["message"]["content"]
    response = ask(running, **input, **options)
    assert text_of(response) == expected
    events = stream(running, **input, **options)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == expected
    assert len(deltas) > 1
    assert text_of(events[-1]["response"]) == expected


def test_the_order_of_events(running: ServiceThread) -> None:
    events = stream(running, input="Tell me a story")
    event_types = [event["type"].removeprefix("response.") for event in events]
    head = ["created", "in_progress", "output_item.added", "content_part.added"]
    tail = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert event_types[:4] == head
    assert event_types[-4:] == tail
    assert set(event_types[4:-4]) == {"output_text.delta"}
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    item = events[-2]["item"]
    assert last["output"] == [item]
    assert {event["item_id"] for event in events[3:-2]} == {item["id"]}
    assert events[-4]["text"] == item["content"][0]["text"] == events[-3]["part"]["text"]
    assert first["id"] == last["id"]


def test_the_shape_of_a_response(running: ServiceThread) -> None:
    reply = ask(running, input="Tell me a story", metadata={"a": "b"}, instructions="Be brief")
    assert reply["id"].startswith("resp_")
    assert reply["object"] == "response"
    assert (reply["status"], reply["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert (reply["error"], reply["completed_at"], reply["store"]) == (None, None, True)
    assert (reply["metadata"], reply["instructions"], reply["temperature"]) == (
        {"a": "b"},
        "Be brief",
        0,
    )
    assert reply["text"] == {"format": {"type": "text"}}
    (item,) = reply["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"][0].keys() == {"type", "text", "annotations", "logprobs"}
    usage = reply["usage"]
    assert usage["output_tokens"] == 24
    assert usage["total_tokens"] == usage["input_tokens"] + 24


def test_a_response_that_ends_by_itself_is_completed(running: ServiceThread) -> None:
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    reply = ask(running, input="Well?", **choice)
    assert (reply["status"], reply["incomplete_details"]) == ("completed", None)
    assert reply["completed_at"] >= reply["created_at"]
    assert reply["output"][0]["status"] == "completed"
    assert stream(running, input="Well?", **choice)[-1]["type"] == "response.completed"


def test_json_of_a_schema(running: ServiceThread) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
    reply = ask(
        running, input="Well?", text={"format": format, "verbosity": "low"}, max_output_tokens=200
    )
    assert json.loads(text_of(reply))["a"] in (1, 2)
    assert reply["text"] == {"format": {**format, "description": None}, "verbosity": "low"}
    reply = ask(
        running, input="Well?", text={"format": {"type": "json_object"}}, max_output_tokens=4
    )
    assert text_of(reply).startswith("{")


CHOICES: list[Any] = [
    "required",
    {"type": "function", "name": "weather"},
    {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    },
]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named", "allowed"])
def test_a_call_that_is_forced(running: ServiceThread, choice: Any) -> None:
    other = {"type": "function", "name": "other"}
    body = {
        "tools": [WEATHER] if choice == "required" else [WEATHER, other],
        "tool_choice": choice,
    }
    reply = ask(running, input="x", max_output_tokens=280, **body)
    (call,) = reply["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"]).keys() == {"city"}
    assert reply["tool_choice"] == choice
    assert reply["tools"][0] == {**WEATHER, "strict": None}
    events = stream(running, input="x", max_output_tokens=280, **body)
    event_types = [event["type"].removeprefix("response.") for event in events]
    calls = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert list(dict.fromkeys(event_types)) == ["created", "in_progress", *calls, "completed"]
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert len(deltas) > 1
    assert "".join(deltas) == call["arguments"]
    assert events[-3]["arguments"] == call["arguments"]
    assert events[-2]["item"] == events[-1]["response"]["output"][0]
    # what came back goes in again
    again = [{"role": "user", "content": "x"}, call]
    again.append({"type": "function_call_output", "call_id": call["call_id"], "output": "sun"})
    assert ask(running, input=again)["usage"]["output_tokens"] > 0


def test_log_probabilities(running: ServiceThread) -> None:
    assert ask(running, input="Hi")["output"][0]["content"][0]["logprobs"] == []
    body = {"input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    entries = ask(running, **body)["output"][0]["content"][0]["logprobs"]
    expected = chat(running, [{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2)[
        "logprobs"
    ]["content"]
    assert entries == expected
    events = stream(running, **body)
    streamed = [
        one
        for event in events
        if event["type"] == "response.output_text.delta"
        for one in event["logprobs"]
    ]
    assert streamed == expected
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == expected


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


@pytest.mark.parametrize(
    "around",
    [("Hi ", " bye"), ("Hi", "bye"), ("", ""), ("Hi <b ", ""), ("", "\n< So < \n")],
    ids=str,
)
def test_each_token_is_reported_beside_the_text_that_it_is_in(
    running: ServiceThread, around: tuple[str, str]
) -> None:
    """Those of a call belong to no message; whole or streamed it is the same."""
    before, after = around
    body = {
        "input": "x",
        "tools": [WEATHER],
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 200,
    }
    body["structured_outputs"] = {"choice": [before + CALL + after]}
    output_items = ask(running, **body)["output"]
    events = stream(running, **body)
    pairs = []
    for output in (output_items, events[-1]["response"]["output"]):
        assert [item["name"] for item in output if item["type"] == "function_call"] == ["weather"]
        parts = [item["content"][0] for item in output if item["type"] == "message"]
        assert [part["text"].strip() for part in parts] == [each.strip() for each in around if each]
        for part in parts:
            assert "".join(one["token"] for one in part["logprobs"]).strip() == part["text"].strip()
        pairs.append([part["logprobs"] for part in parts])
    assert pairs[0] == pairs[1]
    streamed = [
        one
        for event in events
        if event["type"] == "response.output_text.delta"
        for one in event["logprobs"]
    ]
    assert streamed == [one for logprobs in pairs[0] for one in logprobs]


TOKENS = [
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', '"x": 1', "}", "}}", "<", "a",
    " ", "\n", "b c", "",
    "[TOOL_CALLS]", "f[ARGS]{}", "Thought:", "\nAction: f", "\nAction Input:", "1",
    "\nFinal Answer: ", ">a",
]  # fmt: skip


# the same examples every time: a single character that stands twice in what a reader holds may take
# the later place
@settings(deadline=None, max_examples=examples(300, 60), derandomize=True)
@given(
    style=st.sampled_from(
        [
            "hermes",
            "llama3_json",
            "mistral_v1",
            "described",
            "qwen_react",
        ]
    ),
    tokens=st.lists(st.sampled_from(TOKENS), max_size=14),
)
def test_whatever_is_written_the_tokens_of_a_message_hold_its_text(
    style: str, tokens: list[str]
) -> None:
    items, parser = (
        ResponseItemsBuilder(hold_spaces=True),
        make_answer_parser(load_chat_syntax(style), ["f"]),
    )
    for place, token in enumerate(tokens):
        items.record_logprobs(token, [place])
        for piece in parser.push(token):
            deque(
                items.add_text(piece) if isinstance(piece, str) else called(items, piece), maxlen=0
            )
    for piece in parser.flush():
        deque(items.add_text(piece) if isinstance(piece, str) else called(items, piece), maxlen=0)
    deque(items.finish_items("completed"), maxlen=0)
    parts = [item["content"][0] for item in items.output if item["type"] == "message"]
    logprobs = [one for part in parts for one in part["logprobs"]]
    assert logprobs == sorted(set(logprobs))
    for part in parts:
        # blanks at its head may be from before a call, whose tokens belong to no message
        assert part["text"].lstrip() in "".join(tokens[one] for one in part["logprobs"])
    if not any(item["type"] == "function_call" for item in items.output):
        assert logprobs == [*range(len(tokens))] or style == "qwen_react"


def called(items: ResponseItemsBuilder, piece: ToolCallDelta | ReasoningDelta) -> Iterator[Any]:
    assert isinstance(piece, ToolCallDelta), "no thinking here"
    if piece.name is not None:
        yield from items.start_call(piece.id or "", piece.name)
    yield from items.add_arguments(piece.arguments)


WRONG_INPUTS: list[tuple[Any, str]] = [
    ("", "input is empty"),
    ([], "input is empty"),
    (3, "input"),
    (["x"], "input"),
    ([{"type": "web_search_call"}], "items of type 'web_search_call' are not supported"),
    ([{"type": "web_search_call"}], "compaction_summary, item_reference"),
    ([{"type": ["message"]}], "are not supported"),
    ([{"type": "item_reference", "id": "x"}], "input[0]: there is no item 'x'"),
    ([{"role": "tool", "content": "x"}], "input[0].role"),
    ([{"role": "user", "content": "x", "more": 1}], "input[0].more: unknown field"),
    ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "needs its text"),
    ([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], "file_id"),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "needs its image_url"),
    ([{"role": "system", "content": "x"}], "no user or assistant message"),
    ([{"role": "user", "content": "x", "\ud800": 1}], "input[0]: has an unpaired surrogate"),
    ([{"type": "reasoning", "summary": []}], "no user or assistant message"),
    ([{"type": "function_call_output", "call_id": "", "output": "x"}], "call_id"),
]
WRONG: list[tuple[Any, str, str | None]] = [
    *(({"input": each}, message, "input") for each, message in WRONG_INPUTS),
    ({}, "input: field required", "input"),
    ({"input": "x", "conversation": "conv_1"}, "conversations are not stored", "conversation"),
    ({"input": "x", "prompt": {"id": "p"}}, "templates are not stored", "prompt"),
    ({"input": "x", "background": True}, "use stream", "background"),
    ({"input": "x", "truncation": "auto"}, "not supported", "truncation"),
    ({"input": "x", "include": ["file_search_call.more"]}, "not supported", "include"),
    ({"input": "x", "stream_options": {}}, "only for stream", "stream_options"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
    ({"input": "x", "top_logprobs": 21}, "top_logprobs", "top_logprobs"),
    ({"input": "x", "temperature": "0"}, "temperature", "temperature"),
    ({"input": "x", "n": 2}, "n: unknown field", "n"),
    (
        {"input": "x", "tools": [{"type": "magic"}]},
        "tools[0]: 'type' must be one of 'function', 'custom'",
        "tools",
    ),
    ({"input": "x", "tools": [WEATHER, WEATHER]}, "two functions of the same name", "tools"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice needs tools", "tool_choice"),
    (
        {"input": "x", "tool_choice": "required", "tools": [{"type": "web_search"}]},
        "tool_choice needs a tool that may be called; tools[0]: web_search is left out",
        "tool_choice",
    ),
    (
        {"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "b"}},
        "names a",
        "tool_choice",
    ),
    (
        {
            "input": "x",
            "tools": [WEATHER],
            "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "b"}]},
        },
        "names a function",
        "tool_choice",
    ),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "needs a schema", "text"),
    (
        {"input": "x", "text": {"format": {"type": "text", "name": "a"}}},
        "belong to json_schema",
        "text",
    ),
    (
        {
            "input": "x",
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 3}}},
        },
        "",
        None,
    ),
    ({"input": "x", "metadata": {"a": 1}}, "metadata", "metadata"),
    ({"input": "x " * 4000}, "tokens, this engine takes", None),
]


@pytest.mark.parametrize(("body", "message", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_refusals(running: ServiceThread, body: Any, message: str, param: str | None) -> None:
    error = ask(running, 400, **body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param
    # a stream is refused before it begins
    if "stream_options" not in body:
        assert ask(running, 400, stream=True, **body)["error"]["message"] == error["message"]


def test_other_models_and_missing_ones(running: ServiceThread) -> None:
    assert ask(running, 404, model="nobody", input="x")["error"]["code"] == "model_not_found"
    only = running.post("/v1/responses", {"input": "x", "max_output_tokens": 1})
    assert (only.status, only.json["model"]) == (200, "stories")
    assert running.get("/v1/responses/resp_1").status == 404


def test_spaces_before_a_call_are_no_message() -> None:
    items = ResponseItemsBuilder(hold_spaces=True)
    event_types = [event["type"] for event in items.add_text("\n ")]
    event_types += [
        event["type"] for event in (*items.start_call("call_1", "f"), *items.add_arguments("{}"))
    ]
    event_types += [
        event["type"] for event in (*items.add_text("\n"), *items.finish_items("completed"))
    ]
    assert [item["type"] for item in items.output] == ["function_call"]
    assert not any("text" in event_type for event_type in event_types)


def test_text_around_a_call_keeps_its_spaces_and_order() -> None:
    items = ResponseItemsBuilder(hold_spaces=True)
    events = [
        *items.add_text(" "),
        *items.add_text(" Let me see."),
        *items.start_call("call_1", "f"),
        *items.add_arguments("{"),
        *items.add_arguments("}"),
    ]
    events += [*items.add_text(" "), *items.add_text("So")]
    events += items.finish_items("incomplete")
    first, call, last = items.output
    assert first["content"][0]["text"] == "  Let me see."
    assert (first["status"], call["status"], last["status"]) == (
        "completed",
        "completed",
        "incomplete",
    )
    assert call["arguments"] == "{}"
    assert last["content"][0]["text"] == " So"
    places = [event["output_index"] for event in events]
    assert places == sorted(places)
    assert set(places) == {0, 1, 2}


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("text", ["", "  "])
def test_an_answer_of_nothing_is_one_message(holds: bool, text: str) -> None:
    items = ResponseItemsBuilder(holds)
    events = [*items.add_text(text), *items.finish_items("completed")]
    assert "".join(event.get("delta", "") for event in events) == text
    (item,) = items.output
    assert item["content"][0]["text"] == text


def test_a_call_without_a_turn_before_it_gets_one() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    first, second = items_to_messages([{"role": "user", "content": "x"}, call], None)
    assert first["role"] == "user"
    assert (second["role"], second["content"], len(second["tool_calls"])) == ("assistant", None, 1)


def test_a_worker_that_dies_is_reported_in_the_stream(running: ServiceThread) -> None:
    from modelmill.serve.request_handle import HttpRequestHandle
    from modelmill.serve.responses_schema import ResponsesRequest
    from modelmill.serve.routes.responses import ResponsesBuilder, _prepare_chat

    body = ResponsesRequest(model="stories", input="x", stream=True)
    chat, dialogue = _prepare_chat(running.engine.text_processor, body, 512)
    reply = ResponsesBuilder(
        body, chat, HttpRequestHandle([dialogue], lambda _: None), running.engine.text_processor
    )
    from modelmill.serve import errors
    from modelmill.serve.request_handle import WorkerLost

    reply.first_events()
    blocks = (
        reply.error_events(errors.to_api_error(WorkerLost("the engine ended")))
        .decode()
        .split("\n\n")
    )
    error, failed = (
        json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks[:2]
    )
    assert (error["type"], error["sequence_number"], error["code"]) == (
        "error",
        2,
        "engine_restarted",
    )
    assert error["error"]["message"] == error["message"] == "the engine ended"
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "the engine ended"}
