"""Tools of /v1/responses: those of type custom, of a namespace, and those that a client sends to
every server and none runs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from modelmill.core.errors import RequestError
from modelmill.serve.response_items import ResponseItemsBuilder
from modelmill.serve.response_tools import (
    ClientToolName,
    ResponseTool,
    client_names_by_offered_name,
    to_chat_tools,
    tool_warnings,
)
from modelmill.serve.responses_schema import ResponsesRequest, items_to_messages
from modelmill.serve.tool_schema import MAX_TOOLS
from tests.serve.dialect_calls import events, post
from tests.serve.service_thread import ServiceThread

pytestmark = pytest.mark.usefixtures("brief_tools")

PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}  # fmt: skip
NAMESPACE = {
    "type": "namespace", "name": "mcp__files__", "description": "Files",
    "tools": [{"type": "function", "name": "read", "strict": False, "defer_loading": True}],
}  # fmt: skip
SEARCH = {"type": "web_search", "external_web_access": False, "filters": {"a": []}}
ASK: dict[str, Any] = {
    "input": "x", "temperature": 1.5, "seed": 4, "max_output_tokens": 120,
    "tools": [SEARCH, PATCH, NAMESPACE],
}  # fmt: skip


def parsed(*tools: Any) -> list[Any]:
    return TypeAdapter(list[ResponseTool]).validate_python(list(tools))


def test_a_call_of_a_custom_tool_whole_and_streamed(running: ServiceThread) -> None:
    body = {**ASK, "tool_choice": {"type": "custom", "name": "apply_patch"}}
    whole = post(running, "/v1/responses", body).json
    (call,) = whole["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
    assert call["input"]
    assert [line.split(":")[0] for line in whole["warnings"]] == ["tools[0]", "tools"]
    assert whole["tools"][0] == {"type": "web_search"}
    assert whole["tools"][1] == PATCH
    made = list(events(post(running, "/v1/responses", {**body, "stream": True}).body))
    texts = {name: event for name, event in made if "custom_tool_call_input" in name}
    assert texts["response.custom_tool_call_input.delta"]["delta"] == call["input"]
    assert texts["response.custom_tool_call_input.done"]["input"] == call["input"]
    assert made[-1][1]["response"]["output"][0]["input"] == call["input"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
    post(running, "/v1/responses", {
        **ASK, "previous_response_id": whole["id"], "input": [result], "max_output_tokens": 1,
    })  # fmt: skip


def test_a_call_of_a_tool_in_a_namespace(running: ServiceThread) -> None:
    choice = {"type": "function", "name": "read", "namespace": "mcp__files__"}
    (call,) = post(running, "/v1/responses", {**ASK, "tool_choice": choice}).json["output"]
    assert (call["type"], call["name"], call["namespace"]) == (
        "function_call", "read", "mcp__files__",
    )  # fmt: skip
    (message, _) = items_to_messages([call, {"role": "user", "content": "x"}], None)
    assert message["tool_calls"][0]["function"]["name"] == "mcp__files__read"


def test_names_that_the_model_is_offered() -> None:
    tools = parsed(SEARCH, PATCH, NAMESPACE)
    assert client_names_by_offered_name(tools) == {
        "apply_patch": ClientToolName("apply_patch", None, is_custom=True),
        "mcp__files__read": ClientToolName("read", "mcp__files__"),
    }
    patch, read = to_chat_tools(tools)
    assert "start: /.+/" in patch.as_template_tool()["function"]["description"]
    assert read.name == "mcp__files__read"
    assert tool_warnings(tools) == ["tools[0]: web_search is left out: this server runs no tools"]


def test_results_of_tools_that_are_left_out_are_left_out() -> None:
    include = ["web_search_call.action.sources", "reasoning.encrypted_content"]
    body = ResponsesRequest.model_validate(
        {"model": "m", "input": "x", "tools": [SEARCH], "include": include}
    )
    body.to_chat_request()
    assert body.wants_encrypted_reasoning
    assert body.tool_warnings == [
        "tools[0]: web_search is left out: this server runs no tools",
        "include: there is no web_search_call.action.sources: this server runs no tools",
    ]


def test_allowed_tools_may_name_tools_that_are_left_out() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "web_search"}, {"type": "custom", "name": "apply_patch"},
    ]}  # fmt: skip
    body = ResponsesRequest.model_validate({"model": "m", **ASK, "tool_choice": allowed})
    chat = body.to_chat_request()
    assert [tool.name for tool in chat.tools or ()] == ["apply_patch"]
    assert chat.forces_tool_call


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"type": "magic"}, "tools[0]"),
        ({"type": "custom"}, "name: field required"),
        ({**NAMESPACE, "tools": []}, "at least 1"),
        ({"type": "custom", "name": "f", "format": {"type": "grammar"}}, "definition"),
        ({"type": "custom", "name": "f", "format": {"type": "text", "syntax": "lark"}}, "takes no"),
        ({**NAMESPACE, "name": "n" * 127}, "with its namespace"),
    ],
)
def test_refusals_name_the_tool(running: ServiceThread, tool: Any, message: str) -> None:
    refused = running.post("/v1/responses", {"model": "stories", **ASK, "tools": [tool]})
    assert refused.status == 400
    assert message in refused.json["error"]["message"]
    assert refused.json["error"]["message"].startswith("tools")


def test_tools_of_name_spaces_are_counted(running: ServiceThread) -> None:
    spaces = [
        {**NAMESPACE, "name": space, "tools": [
            {"type": "function", "name": f"t{place}"} for place in range(MAX_TOOLS // 2 + 1)
        ]}
        for space in "ab"
    ]  # fmt: skip
    refused = running.post("/v1/responses", {"model": "stories", **ASK, "tools": spaces})
    assert refused.status == 400
    assert f"{MAX_TOOLS + 2} with those of namespaces" in refused.json["error"]["message"]


def test_warnings_name_the_fields_of_responses(running: ServiceThread) -> None:
    schema = {"type": "array", "uniqueItems": True, "maxItems": 1}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    body = {"input": "x", "max_output_tokens": 1, "text": text}
    assert post(running, "/v1/responses", body).json["warnings"] == [
        "text.format: uniqueItems is not enforced"
    ]


def test_custom_calls_of_the_input_are_calls_of_the_function() -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
    ]
    _, call, result = items_to_messages(items, None)
    function = call["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == (
        "apply_patch", {"input": 'a "b"'},
    )  # fmt: skip
    assert result == {"role": "tool", "tool_call_id": "c", "content": "ok"}


def test_what_codex_sends(running: ServiceThread) -> None:
    """The fields of its ResponsesApiRequest, with the tools of its defaults."""
    body = {
        "instructions": "You are Codex", "tools": [SEARCH, NAMESPACE, {"type": "image_generation"}],
        "tool_choice": "auto", "parallel_tool_calls": True, "store": False, "stream": True,
        "reasoning": {"effort": "medium", "summary": "auto"}, "service_tier": "auto",
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "text": {"verbosity": "low"}, "client_metadata": {"x-codex-installation-id": "i"},
        "input": [
            {"type": "message", "role": "developer",
             "content": [{"type": "input_text", "text": "Be brief"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": None},
            {"type": "function_call", "name": "read", "namespace": "mcp__files__",
             "arguments": "{}", "call_id": "a"},
            {"type": "function_call_output", "call_id": "a",
             "output": [{"type": "input_text", "text": "r"}]},
            {"type": "custom_tool_call", "name": "apply_patch", "input": "p", "call_id": "b"},
            {"type": "custom_tool_call_output", "call_id": "b", "name": "apply_patch",
             "output": "done"},
        ],
        "max_output_tokens": 1,
    }  # fmt: skip
    made = list(events(post(running, "/v1/responses", body).body))
    assert made[-1][0] == "response.incomplete"
    assert len(made[-1][1]["response"]["warnings"]) == 2


def test_a_custom_call_that_was_cut() -> None:
    items = ResponseItemsBuilder(False, {"run": ClientToolName("run", None, is_custom=True)})
    made = [*items.start_call("c", "run"), *items.add_arguments('{"input": "ls'),
            *items.finish_items("incomplete")]  # fmt: skip
    assert [event["type"].removeprefix("response.") for event in made] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done",
    ]  # fmt: skip
    assert (items.output[0]["input"], items.output[0]["status"]) == ("ls", "incomplete")


def test_a_namespaced_name_is_checked_at_parsing() -> None:
    with pytest.raises(RequestError, match="characters with its namespace"):
        to_chat_tools(parsed({**NAMESPACE, "name": "n" * 127}))
