"""Function calling over the API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.dialogue import Dialogue
from tests.serve.running import Running

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Ulm", "Bonn"]}, "days": {"enum": [1, 2]}},
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = {"model": "stories", "messages": [{"role": "user", "content": "x"}], "max_tokens": 280, "temperature": 0}


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reads 512 tokens, and nearly every letter is one."""
    monkeypatch.setattr("modelmill.text.tools.INTRO", "{tools}")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_forced_call(running: Running, choice: Any) -> None:
    body = {**ASK, "tools": [WEATHER], "tool_choice": choice}
    whole = running.post("/v1/chat/completions", body).json["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    (call,) = whole["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"town", "days"}
    events = running.post("/v1/chat/completions", {**body, "stream": True}).events
    assert events[-1] == "[DONE]"
    deltas = [event["choices"][0] for event in events[:-1]]
    told = [call for delta in deltas for call in delta["delta"].get("tool_calls", ())]
    assert len(told) > 2
    assert told[0]["id"]
    assert told[0]["function"]["name"] == "weather"
    assert {piece["index"] for piece in told} == {0}
    assert not any("id" in piece or "name" in piece["function"] for piece in told[1:])
    assert "".join(piece["function"]["arguments"] for piece in told) == call["function"]["arguments"]
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert not any(delta["delta"].get("content") for delta in deltas)


def test_one_of_two_tools(running: Running) -> None:
    body = {**ASK, "tools": [WEATHER, NOW], "tool_choice": "required", "temperature": 1.5, "n": 6, "seed": 1}
    names = set()
    for choice in running.post("/v1/chat/completions", body).json["choices"]:
        if choice["finish_reason"] == "tool_calls":
            names.add(choice["message"]["tool_calls"][0]["function"]["name"])
    assert names
    assert names <= {"weather", "now"}


def test_a_call_that_the_model_writes_by_itself(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model here cannot write one, so one is put into its mouth."""
    said = 'Wait. <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    push = Dialogue.push

    def instead(self: Dialogue, token: Any) -> Any:
        delta, _ = push(self, token)
        output = self.answer.outputs[0]
        text, output.text = said[len(output.token_ids) * 9 - 9 :][:9], said
        output.finish_reason = "stop" if len(output.token_ids) * 9 >= len(said) else None
        return type(delta)(0, text, delta.token_ids, output.finish_reason, self.answer), False

    monkeypatch.setattr(Dialogue, "push", instead)
    body = {**ASK, "tools": [NOW]}
    choice = running.post("/v1/chat/completions", body).json["choices"][0]
    assert choice["message"]["content"] == "Wait."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls"
    events = running.post("/v1/chat/completions", {**body, "stream": True}).events
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "Wait."
    told = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert [function["name"] for function in told if "name" in function] == ["now"]
    monkeypatch.undo()
    none = running.post("/v1/chat/completions", {**body, "tool_choice": "none"}).json["choices"][0]
    assert "tool_calls" not in none["message"]


def test_a_conversation_with_calls_goes_on(running: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm", "days": 1}'}}
    talk = [*ASK["messages"], {"role": "assistant", "content": None, "tool_calls": [call]},  # type: ignore[misc]
            {"role": "tool", "tool_call_id": "c1", "content": "Sun"}]  # fmt: skip
    response = running.post("/v1/chat/completions", {**ASK, "messages": talk, "tools": [WEATHER], "max_tokens": 3})
    assert response.status == 200, response.body


def test_several_calls_at_once(running: Running) -> None:
    """Only where parallel calls are asked for: a list of them."""
    body = {**ASK, "tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": True, "max_tokens": 400}
    counts = set()
    for seed in range(8):
        ask = {**body, "temperature": 1.5, "seed": seed}
        choice = running.post("/v1/chat/completions", ask).json["choices"][0]
        calls = choice["message"]["tool_calls"]
        counts.add(len(calls))
        pieces = [
            piece
            for event in running.post("/v1/chat/completions", {**ask, "stream": True}).events[:-1]
            for piece in event["choices"][0]["delta"].get("tool_calls", ())
        ]
        for place, call in enumerate(calls):
            mine = [piece["function"] for piece in pieces if piece["index"] == place]
            assert mine[0]["name"] == call["function"]["name"]
            assert "".join(function["arguments"] for function in mine) == call["function"]["arguments"]
            if choice["finish_reason"] == "tool_calls":
                json.loads(call["function"]["arguments"])
        alone = running.post("/v1/chat/completions", {**ask, "parallel_tool_calls": False}).json["choices"][0]
        assert len(alone["message"]["tool_calls"]) == 1
    assert max(counts) > 1


ODD = {"type": "function", "function": {"name": "x", "parameters": {"type": "odd"}}}
BAD = [
    {"tools": [{}]}, {"tools": [{"type": "function"}]}, {"tools": [{"type": "code", "function": {"name": "x"}}]},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]}, {"tools": [NOW] * 2}, {"tools": [NOW] * 1000},
    {"tool_choice": "required"}, {"tools": [NOW], "tool_choice": "sometimes"},
    {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    {"tools": [ODD], "tool_choice": "required"},
    {"tools": [NOW], "tool_choice": "required", "response_format": {"type": "json_object"}},
    {"tools": [{"type": "function", "function": {"name": "x" * 10**4}}]}, {"functions": [{"name": "x"}]},
]  # fmt: skip


@pytest.mark.parametrize("more", BAD, ids=range(len(BAD)))
def test_tools_that_are_none(running: Running, more: Any) -> None:
    response = running.post("/v1/chat/completions", {**ASK, **more})
    assert response.status == 400, response.body
    assert response.json["error"]["type"] == "invalid_request_error"


def test_a_stop_string_in_the_middle_of_a_call_leaves_none_that_could_be_made(running: Running) -> None:
    body = {**ASK, "tools": [WEATHER], "tool_choice": "required"}
    for stop, reason in (("town", "stop"), ("no such text", "tool_calls")):
        (choice,) = running.post("/v1/chat/completions", {**body, "stop": [stop]}).json["choices"]
        events = running.post("/v1/chat/completions", {**body, "stop": stop, "stream": True}).events
        assert choice["finish_reason"] == events[-2]["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_forced_call_that_is_cut_before_it_is_one_is_no_content(running: Running, count: int) -> None:
    body = {**ASK, "tools": [WEATHER], "tool_choice": "required", "max_tokens": count}
    (choice,) = running.post("/v1/chat/completions", body).json["choices"]
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    assert not choice["message"].get("tool_calls")
    events = running.post("/v1/chat/completions", {**body, "stream": True}).events
    deltas = [event["choices"][0] for event in events[:-1]]
    assert not any(delta["delta"].get("content") or delta["delta"].get("tool_calls") for delta in deltas)
    assert deltas[-1]["finish_reason"] == "length"
    asked = {"input": "x", "tools": [{"type": "function", **WEATHER["function"]}], "tool_choice": "required"}
    told = running.post(
        "/v1/responses", {**asked, "model": "stories", "max_output_tokens": count, "temperature": 0}
    ).json
    assert told["status"] == "incomplete"
    assert not any(part["text"] for item in told["output"] for part in item["content"])
