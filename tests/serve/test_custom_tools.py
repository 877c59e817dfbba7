"""Tools of type custom: offered as a function, called with a text, streamed or whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.serve.custom_tools import ToolCallDeltaFormatter, parse_custom_input
from modelmill.serve.message_cleaning import clean_messages
from modelmill.serve.tool_schema import CustomTool
from modelmill.text.answer_pieces import ToolCallDelta
from tests.serve.dialect_calls import events, post
from tests.serve.service_thread import ServiceThread

pytestmark = pytest.mark.usefixtures("brief_tools")

TOOL = {"type": "custom", "custom": {"name": "run", "description": "d"}}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}], "temperature": 1.5, "seed": 4,
    "max_tokens": 120,
    "tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "run"}},
}  # fmt: skip


def test_a_forced_call(running: ServiceThread) -> None:
    message = post(running, "/v1/chat/completions", ASK).json["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "run")
    assert call["custom"]["input"]
    made = events(post(running, "/v1/chat/completions", {**ASK, "stream": True}).body)
    deltas = [
        part for _, event in made for part in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert deltas[0]["custom"] == {"name": "run", "input": ""}
    assert "".join(part["custom"]["input"] for part in deltas) == call["custom"]["input"]
    history = [*ASK["messages"], message,
               {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]  # fmt: skip
    body = {**ASK, "messages": history, "tool_choice": "auto", "max_tokens": 1}
    post(running, "/v1/chat/completions", body)


def test_a_grammar_is_part_of_the_description(running: ServiceThread) -> None:
    grammar = {"syntax": "regex", "definition": "[ab]+"}
    tool = {"type": "custom", "custom": {"name": "run", "format": {
        "type": "grammar", "grammar": grammar}}}  # fmt: skip
    body = {**ASK, "tools": [tool], "max_tokens": 1}
    answer = post(running, "/v1/chat/completions", body).json
    assert answer["warnings"] == [
        "tools: the grammar of run is part of its description, and not enforced"
    ]
    made = CustomTool.model_validate(tool).as_template_tool()
    assert made["function"]["description"].endswith("(regex):\n[ab]+")
    del tool["custom"]["format"]["grammar"]  # type: ignore[index]
    refused = running.post("/v1/chat/completions", {"model": "stories", **ASK, "tools": [tool]})
    assert refused.status == 400
    assert "needs grammar" in refused.json["error"]["message"]


def test_deltas_of_functions_and_custom_tools() -> None:
    deltas = ToolCallDeltaFormatter({"run"})
    parts = [
        ToolCallDelta(0, '{"a"', "c0", "f"),
        ToolCallDelta(0, ":1}"),
        ToolCallDelta(1, '{"input": "l', "c1", "run"),
        ToolCallDelta(1, 's\\n"}'),
        ToolCallDelta(2, "{}", "c2", "f"),
    ]
    out = [each for part in parts for each in deltas.format([part], ended=part is parts[-1])]
    assert [each.get("custom") for each in out] == [
        None, None, {"name": "run", "input": ""}, {"input": "ls\n"}, None,
    ]  # fmt: skip
    assert [each["index"] for each in out] == [0, 0, 1, 1, 2]
    assert deltas.format([ToolCallDelta(3, '{"input": "cut', "c3", "run")], ended=True)[1] == {
        "index": 3,
        "custom": {"input": "cut"},
    }
    assert parse_custom_input("[") == ""


def test_earlier_calls_become_calls_of_the_function() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "run", "input": 'a "b"'}}
    (message,) = clean_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    function = message["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("run", {"input": 'a "b"'})
