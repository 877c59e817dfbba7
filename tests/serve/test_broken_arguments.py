"""Arguments that a model breaks or that no client can read: one rule in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.dialect_calls import DIALECTS, events, post
from tests.serve.replaced_answers import replace_answers
from tests.serve.service_thread import ServiceThread

pytestmark = pytest.mark.usefixtures("brief_tools")

LARGEST = 1.7976931348623157e308
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "parameters": SCHEMA}
CALL = '<tool_call>\n{{"name": "weather", "arguments": {}}}\n</tool_call>'
OPEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ul'
CASES: list[tuple[str, Any]] = [
    (CALL.format('{"city": "Ulm", "big": 1e999, "low": -1e400}'),
     {"city": "Ulm", "big": LARGEST, "low": -LARGEST}),
    (CALL.format(f'{{"n": {"7" * 5000}, "m": {"7" * 300}}}'),
     {"n": int(LARGEST), "m": int("7" * 300)}),
    (CALL.format(r'{"x": 1, "city": "lone \ud83d end", "y": 2}'),
     {"x": 1, "city": "lone \ufffd end", "y": 2}),
    (CALL.format('{"city": NaN, "x": 1}'), {"city": None, "x": 1}),
    (CALL.format('{"city": nix, "x": 1}'), {}),
    (CALL.replace("}}\n", "\n").format('{"city": "Ulm"'), {"city": "Ulm"}),
    ('<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "at": [1, "a', {
        "city": "Ulm", "at": [1, "a"]}),
]  # fmt: skip
IDS = ["float", "integer", "surrogate", "nan", "word", "brace", "end"]


@pytest.mark.parametrize(("written", "arguments"), CASES, ids=IDS)
def test_every_dialect_has_the_same_arguments(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch, written: str, arguments: Any
) -> None:
    replace_answers(monkeypatch, written, max(7, len(written) // 90))
    answers = [
        (name, answer)
        for name, call in DIALECTS.items()
        for answer in call(running, None, "x", [WEATHER], 280, "")
    ]
    expected = answers[0][1]
    assert expected.calls == [("weather", arguments)]
    assert (expected.text, expected.reason) == ("", "tool_calls")
    assert not [each for each in answers if each[1] != expected]


@pytest.mark.parametrize(("reason", "stop"), [("length", None), ("stop", "m")])
def test_a_call_that_was_cut_off_stays_a_prefix(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch, reason: str, stop: str | None
) -> None:
    """An item of a response is then incomplete; Ollama, whose arguments are objects, has none."""
    replace_answers(monkeypatch, OPEN, 7, reason, stop)
    tools = [{"type": "function", **WEATHER}]
    more = {} if stop is None else {"stop": [stop]}
    body: dict[str, Any] = {"input": "x", "tools": tools}
    whole = post(running, "/v1/responses", body).json
    streamed = [*events(post(running, "/v1/responses", {**body, "stream": True}).body)]
    deltas = [data["delta"] for name, data in streamed if name.endswith("arguments.delta")]
    assert "".join(deltas) == '{"city": "Ul'
    done = next(data["item"] for name, data in streamed if name == "response.output_item.done")
    for item in (whole["output"][0], streamed[-1][1]["response"]["output"][0], done):
        assert (item["arguments"], item["status"]) == ('{"city": "Ul', "incomplete")
    assert whole["status"] == ("incomplete" if stop is None else "completed")
    wrapped = [{"type": "function", "function": WEATHER}]
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": wrapped}
    choice = post(running, "/v1/chat/completions", {**chat, **more}).json["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ul'
    assert choice["finish_reason"] == reason
    ollama = post(running, "/api/chat", {**chat, "stream": False}).json
    assert "tool_calls" not in ollama["message"]


@pytest.mark.parametrize("streams", [False, True])
def test_bounds_beyond_64_bits_are_served(running: ServiceThread, streams: bool) -> None:
    """A warning says that they are not enforced."""
    number = {"type": "integer", "minimum": 0, "maximum": 2**64}
    schema = {
        "type": "object",
        "properties": {"x": number},
        "required": ["x"],
        "additionalProperties": False,
    }
    warning = "#/properties/x: maximum is not enforced: its magnitude is 2^63 or more"
    text = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    plain = {"messages": [{"role": "user", "content": "x"}], "stream": streams}
    ask = {**plain, "max_tokens": 8}
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    tool = {"name": "f", "input_schema": schema}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {**ask, "response_format": text}),
        ("/v1/chat/completions", {**ask, "tools": [function], "tool_choice": "required"}),
        ("/v1/messages", {**ask, "tools": [tool], "tool_choice": {"type": "any"}}),
        ("/api/chat", {**plain, "format": schema, "options": {"num_predict": 8}}),
    ]
    for path, body in bodies:
        assert warning in post(running, path, body).body.decode(), path


def test_an_exact_integer_beyond_64_bits_is_named(running: ServiceThread) -> None:
    schema = {"type": "object", "properties": {"x": {"const": 2**64}}}
    text = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"model": "stories", "messages": [{"role": "user", "content": "x"}]}
    response = running.post("/v1/chat/completions", {**body, "response_format": text})
    assert response.status == 400
    assert response.json["error"]["message"] == (
        "response_format: the JSON schema cannot be used: "
        f"the grammar library takes no integer of more than 64 bits: {2**64}"
    )


def test_a_conversation_goes_on_after_such_arguments(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent is taken back in every form."""
    arguments = {"x": LARGEST, "city": "\ufffd"}
    user = {"role": "user", "content": "x"}
    function = {"name": "weather", "arguments": json.dumps(arguments)}
    call = {"id": "c1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "c1", "content": "Sun"}
    chat = [user, {"role": "assistant", "tool_calls": [call]}, result]
    used = {"type": "tool_use", "id": "c1", "name": "weather", "input": arguments}
    sun = {"type": "tool_result", "tool_use_id": "c1", "content": "Sun"}
    blocks = [
        user,
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [sun]},
    ]
    objects = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "weather", "arguments": arguments}}]},
        {"role": "tool", "content": "Sun"},
    ]  # fmt: skip
    post(running, "/v1/chat/completions", {"messages": chat, "max_tokens": 2})
    post(running, "/v1/messages", {"messages": blocks, "max_tokens": 2})
    post(running, "/api/chat", {"messages": objects, "options": {"num_predict": 2}})
