"""The same conversation in every dialect, whole and streamed, as one form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.serve.service_thread import ServiceThread

MODEL = "stories"


@dataclass
class DialectAnswer:
    """What an answer says, whatever its dialect.

    calls: (name, arguments) of each. reason: OpenAI's finish_reason.
    """

    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0


def events(body: bytes) -> Iterator[tuple[str, Any]]:
    """(name, data) of server-sent events; the name of an event without one is empty."""
    for block in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = "", ""
        for line in block.split("\n"):
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                data = value
        if data and data != "[DONE]":
            yield name, json.loads(data)


def post(running: ServiceThread, path: str, body: dict[str, Any]) -> Any:
    response = running.post(path, {"model": MODEL, **body})
    assert response.status == 200, response.body
    return response


def openai_messages(system: str | None, user: str, tools: list[Any], **more: Any) -> dict[str, Any]:
    """A body of chat completions."""
    head = [] if system is None else [{"role": "system", "content": system}]
    wrapped = [{"type": "function", "function": tool} for tool in tools]
    body: dict[str, Any] = {"messages": [*head, {"role": "user", "content": user}], **more}
    return {**body, "tools": wrapped} if tools else body


def chat(
    running: ServiceThread, system: str | None, user: str, tools: list[Any], limit: int, forced: str
) -> Iterator[DialectAnswer]:
    more: dict[str, Any] = {"temperature": 0, "max_tokens": limit}
    if forced:
        more["tool_choice"] = {"type": "function", "function": {"name": forced}}
    body = openai_messages(system, user, tools, **more)
    whole = post(running, "/v1/chat/completions", body).json
    choice, usage = whole["choices"][0], whole["usage"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    yield DialectAnswer(
        choice["message"]["content"] or "",
        [(each["name"], json.loads(each["arguments"])) for each in calls],
        choice["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    options = {"include_usage": True}
    streamed = post(
        running, "/v1/chat/completions", {**body, "stream": True, "stream_options": options}
    )
    answer, arguments = DialectAnswer(), dict[int, list[str]]()
    for _, event in events(streamed.body):
        for choice in event["choices"]:
            answer.text += choice["delta"].get("content") or ""
            answer.reason = choice["finish_reason"] or answer.reason
            for call in choice["delta"].get("tool_calls", ()):
                parts = arguments.setdefault(call["index"], [])
                parts.append(call["function"].get("name", ""))
                parts.append(call["function"]["arguments"])
        if event.get("usage"):
            answer.prompt_tokens = event["usage"]["prompt_tokens"]
            answer.output_tokens = event["usage"]["completion_tokens"]
    answer.calls = [(parts[0], json.loads("".join(parts[1:]))) for parts in arguments.values()]
    yield answer


def responses(
    running: ServiceThread, system: str | None, user: str, tools: list[Any], limit: int, forced: str
) -> Iterator[DialectAnswer]:
    body: dict[str, Any] = {"input": user, "temperature": 0, "max_output_tokens": limit}
    if system is not None:
        body["instructions"] = system
    if tools:
        body["tools"] = [{"type": "function", **tool} for tool in tools]
    if forced:
        body["tool_choice"] = {"type": "function", "name": forced}
    yield _response(post(running, "/v1/responses", body).json)
    last = [*events(post(running, "/v1/responses", {**body, "stream": True}).body)][-1][1]
    yield _response(last["response"])


def _response(value: Any) -> DialectAnswer:
    answer = DialectAnswer(
        prompt_tokens=value["usage"]["input_tokens"], output_tokens=value["usage"]["output_tokens"]
    )
    for item in value["output"]:
        if item["type"] == "function_call":
            answer.calls.append((item["name"], json.loads(item["arguments"])))
        else:
            answer.text += "".join(part["text"] for part in item["content"])
    cut = value["status"] == "incomplete"
    answer.reason = "length" if cut else "tool_calls" if answer.calls else "stop"
    return answer


REASONS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def messages(
    running: ServiceThread, system: str | None, user: str, tools: list[Any], limit: int, forced: str
) -> Iterator[DialectAnswer]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": user}],
        "max_tokens": limit,
        "temperature": 0,
    }
    if system is not None:
        body["system"] = [{"type": "text", "text": system}]
    if tools:
        body["tools"] = [
            {"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools
        ]
    if forced:
        body["tool_choice"] = {"type": "tool", "name": forced}
    yield _message(post(running, "/v1/messages", body).json)
    yield _message(join_message(post(running, "/v1/messages", {**body, "stream": True}).body))


def join_message(body: bytes) -> dict[str, Any]:
    """The message of a stream, whose events must come in order."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    open_index = None
    for name, event in events(body):
        assert name == event["type"]
        if name == "message_start":
            assert not message
            message = event["message"]
        elif name == "content_block_start":
            assert open_index is None
            assert event["index"] == len(message["content"])
            open_index = event["index"]
            message["content"].append(dict(event["content_block"]))
        elif name == "content_block_delta":
            assert event["index"] == open_index
            block, delta = message["content"][open_index], event["delta"]
            if delta["type"] == "input_json_delta":
                inputs[open_index] = inputs.get(open_index, "") + delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif name == "content_block_stop":
            assert event["index"] == open_index
            if open_index in inputs:
                message["content"][open_index]["input"] = json.loads(inputs[open_index])
            open_index = None
        elif name == "message_delta":
            assert open_index is None
            message |= event["delta"]
            message["usage"] = event["usage"]
        else:
            assert name in ("ping", "message_stop")
    assert name == "message_stop"
    return message


def _message(value: Any) -> DialectAnswer:
    usage = value["usage"]
    blocks = value["content"]
    return DialectAnswer(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        REASONS[value["stop_reason"]],
        usage["input_tokens"] + usage["cache_read_input_tokens"],
        usage["output_tokens"],
    )


def ollama(
    running: ServiceThread, system: str | None, user: str, tools: list[Any], limit: int, forced: str
) -> Iterator[DialectAnswer]:
    assert not forced, "Ollama has no tool_choice"
    body = openai_messages(system, user, tools)
    body["options"] = {"temperature": 0, "num_predict": limit}
    yield _ollama([post(running, "/api/chat", {**body, "stream": False}).json])
    lines = post(running, "/api/chat", body).body.decode().splitlines()
    yield _ollama([json.loads(line) for line in lines])


def _ollama(lines: list[Any]) -> DialectAnswer:
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    last = lines[-1]
    return DialectAnswer(
        "".join(line["message"]["content"] for line in lines),
        [(call["name"], call["arguments"]) for call in calls],
        "tool_calls" if calls else last["done_reason"],
        last["prompt_eval_count"],
        last["eval_count"],
    )


DIALECTS = {"chat": chat, "responses": responses, "messages": messages, "ollama": ollama}
