"""Tools of type custom: offered as a function, called with a text, streamed or whole."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from modelmill.serve.custom_tools import (
    ToolCallDeltaFormatter,
    check_regex_syntax,
    parse_custom_input,
)
from modelmill.serve.message_cleaning import clean_messages
from modelmill.serve.tool_schema import CustomTool
from modelmill.text.answer_grammar import whole_answer_grammar
from modelmill.text.answer_pieces import ToolCallDelta
from modelmill.text.chat_format_registry import load_chat_syntax
from modelmill.text.grammar import check_grammar
from modelmill.text.tool_grammar import forced_call_grammar, optional_strict_call_grammar
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


def tool_with_grammar(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"syntax": syntax, "definition": definition}
    format = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": {"name": "run", "format": format}}


def test_a_grammar_is_part_of_the_description(running: ServiceThread) -> None:
    tool = tool_with_grammar("lark", 'start: "a"')
    body = {**ASK, "tools": [tool], "max_tokens": 1}
    answer = post(running, "/v1/chat/completions", body).json
    assert answer["warnings"] == [
        "tools: the grammar of run is part of its description, and not enforced"
    ]
    made = CustomTool.model_validate(tool).as_template_tool()
    assert made["function"]["description"].endswith('(lark):\nstart: "a"')
    del tool["custom"]["format"]["grammar"]
    refused = running.post("/v1/chat/completions", {"model": "stories", **ASK, "tools": [tool]})
    assert refused.status == 400
    assert "needs grammar" in refused.json["error"]["message"]


@pytest.mark.parametrize(
    "regex", ["[0-9]{3}", "^[0-9]{3}$", "[0-9]{2}|[a-c]{4}", r'"\d"\n', "(?i)ab/c"]
)
@pytest.mark.parametrize("choice", [ASK["tool_choice"], "required"], ids=["named", "required"])
def test_a_regex_is_enforced(running: ServiceThread, regex: str, choice: Any) -> None:
    short = {"temperature": 0.5, "max_tokens": 200}  # blanks between the parts of JSON count, too
    body = {**ASK, **short, "tools": [tool_with_grammar("regex", regex)], "tool_choice": choice}
    answer = post(running, "/v1/chat/completions", body).json
    assert "warnings" not in answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch(regex, call["custom"]["input"])
    flat = {"type": "custom", "name": "run",
            "format": {"type": "grammar", "syntax": "regex", "definition": regex}}  # fmt: skip
    ask = {"input": "x", "temperature": 0.5, "max_output_tokens": 200, "tools": [flat],
           "tool_choice": "required"}  # fmt: skip
    response = post(running, "/v1/responses", ask).json
    assert re.fullmatch(regex, response["output"][0]["input"])
    assert "warnings" not in response


@pytest.mark.parametrize("format_name", ["hermes", "qwen3_coder", "gemma4", "described", "gpt_oss"])
def test_a_regex_is_enforced_in_every_call_syntax(format_name: str) -> None:
    tool = CustomTool.model_validate(tool_with_grammar("regex", "[0-9]{3}")).as_template_tool()
    for grammar in (
        forced_call_grammar([tool], "run"),
        optional_strict_call_grammar(
            [tool], True, as_json=load_chat_syntax(format_name).calls.writes_arguments_as_json
        ),
    ):
        whole = whole_answer_grammar(grammar, format_name, None, "closed")
        assert whole is not None
        check_grammar(whole)
        assert "[0-9]{3}" in whole.text


@pytest.mark.parametrize("regex", ["a(?=b)", r"(a)\1"])
def test_a_regex_that_cannot_be_enforced_is_told(running: ServiceThread, regex: str) -> None:
    body = {**ASK, "tools": [tool_with_grammar("regex", regex)], "max_tokens": 1}
    answer = post(running, "/v1/chat/completions", body).json
    assert answer["warnings"] == [
        "tools: the grammar of run is part of its description, and not enforced"
    ]


@pytest.mark.parametrize("regex", ["(", "a)(b", "[a", "*", "(" * 20_000])
def test_a_malformed_regex_is_refused(running: ServiceThread, regex: str) -> None:
    body = {**ASK, "tools": [tool_with_grammar("regex", regex)], "max_tokens": 1}
    answer = running.post("/v1/chat/completions", {"model": "stories", **body})
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith("tools: a regex of a format is malformed: ")
    assert answer.json["error"]["param"] == "tools"


@pytest.mark.parametrize("regex", [r"\p{Lu}{2}", "^[0-9]{3}$"])
def test_a_regex_of_either_notation_is_taken(regex: str) -> None:
    check_regex_syntax(regex)


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
