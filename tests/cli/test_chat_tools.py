"""Tool definitions of a chat, and the results that the user gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelmill.cli.chat_tools import (
    ask_tool_results,
    format_call,
    format_tools,
    make_call_message,
    read_tool_definitions,
)
from modelmill.core.errors import UsageError
from modelmill.text.answer_pieces import ParsedToolCall

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {}, "day": {}}},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
CALLS = [ParsedToolCall("a", "weather", '{"city": "Rome"}'), ParsedToolCall("b", "time", "{}")]


@pytest.mark.parametrize("wrapped", [False, True], ids=["list", "request"])
def test_a_file_of_tools(tmp_path: Path, wrapped: bool) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps({"tools": [WEATHER, TIME]} if wrapped else [WEATHER, TIME]))
    tools = read_tool_definitions(file)
    assert tools == (WEATHER, TIME)
    assert format_tools(tools).splitlines() == ["weather(city, day): Weather of a city", "time()"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no list of tools"),
        ('{"name": "x"}', "holds no list of tools"),
        ('[{"name": "x", "input_schema": {}}]', r"tools\[0\] is no function"),
        ('[{"type": "custom", "function": {"name": "x"}}]', r"tools\[0\] is no function"),
        ('[{"type": "function", "function": {"name": " "}}]', r"tools\[0\] has no name"),
        ('[{"function": {"name": "x", "parameters": 1}}]', "must be a JSON schema"),
        ('[{"function": {"name": "x"}}, {"function": {"name": "x"}}]', "two tools are named x"),
    ],
)
def test_a_file_that_is_no_list_of_tools(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tools.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_tool_definitions(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_tool_definitions(tmp_path / "none.json")


def test_results_are_typed_or_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "result.txt"
    file.write_text("10 o'clock")
    lines, prompts, complaints = iter(["Sun", f"@{tmp_path}/no", f"@{file}"]), [], []

    def read_line(prompt: str) -> str | None:
        prompts.append(prompt)
        return next(lines)

    assert ask_tool_results(CALLS, read_line, complaints.append) == [
        {"role": "tool", "tool_call_id": "a", "content": "Sun"},
        {"role": "tool", "tool_call_id": "b", "content": "10 o'clock"},
    ]
    assert prompts == ["weather= ", "time= ", "time= "]
    assert [line.startswith("cannot read") for line in complaints] == [True]


@pytest.mark.parametrize("line", ["", "  ", None])
def test_an_empty_result_leaves_the_calls_open(line: str | None) -> None:
    lines = iter(["Sun", line])
    assert ask_tool_results(CALLS, lambda _: next(lines), lambda _: None) is None


def test_how_calls_are_shown_and_stored() -> None:
    assert format_call(CALLS[0]) == '[call] weather({"city": "Rome"})'
    message = make_call_message("So:", CALLS[:1])
    assert message["content"] == "So:"
    assert message["tool_calls"] == [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
        }
    ]
