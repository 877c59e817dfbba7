"""What is valid in one API and not in the core that answers it: an error that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.core.types import MAX_STOP_STRINGS
from modelmill.serve.dialects.anthropic_schema import MessagesRequest
from modelmill.serve.dialects.llama_cpp_schema import InfillRequest
from modelmill.serve.dialects.ollama_schema import OllamaChatRequest
from modelmill.serve.responses_schema import ResponsesRequest
from modelmill.serve.strict_models import MAX_ITEMS
from modelmill.serve.tool_schema import MAX_TOOLS
from tests.serve.service_thread import ServiceThread

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object"}


def test_as_many_tools_as_agents_with_many_servers_send() -> None:
    names = [f"mcp__server__{index}" for index in range(MAX_TOOLS)]
    anthropic = MessagesRequest.model_validate(
        {
            "model": "m",
            "max_tokens": 1,
            "messages": HI,
            "tools": [{"name": name, "input_schema": SCHEMA} for name in names],
        }
    )
    functions = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names
    ]
    ollama = OllamaChatRequest.model_validate({"model": "m", "messages": HI, "tools": functions})
    flat = [{"type": "function", "name": name, "parameters": SCHEMA} for name in names]
    responses = ResponsesRequest.model_validate({"model": "m", "input": "Hi", "tools": flat})
    for request in (anthropic, ollama, responses):
        tools = request.to_chat_request().tools
        assert tools is not None
        assert [tool.name for tool in tools] == names


def test_what_editors_send_to_fill_in_text() -> None:
    body: dict[str, Any] = {"input_prefix": "a", "input_suffix": "b", "n_predict": 128}
    limits = {"t_max_prompt_ms": 500, "t_max_predict_ms": 1000}
    made = InfillRequest.model_validate({**body, **limits}).to_completion_request()
    assert (made.prompt, made.suffix, made.n_predict) == ("a", "b", 128)


@pytest.mark.parametrize(
    "options", [{"temperature": 101}, {"stop": ["a"] * (MAX_STOP_STRINGS + 1)}, {"top_p": -1}]
)
def test_options_out_of_range_are_named(running: ServiceThread, options: dict[str, Any]) -> None:
    response = running.post("/api/chat", {"model": "stories", "messages": HI, "options": options})
    assert response.status == 400
    assert response.json["error"].startswith(f"options.{next(iter(options))}")


def test_a_conversation_that_becomes_too_long_is_an_error_of_the_client() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    fields = {"model": "m", "max_tokens": 1, "system": "s", "messages": messages * (MAX_ITEMS // 2)}
    request = MessagesRequest.model_validate(fields)
    with pytest.raises(RequestError, match=f"^messages: must have at most {MAX_ITEMS} items$"):
        request.to_chat_request()
    items = {"model": "m", "instructions": "s", "input": messages * (MAX_ITEMS // 2)}
    response = ResponsesRequest.model_validate(items)
    with pytest.raises(RequestError, match=f"^input: {MAX_ITEMS + 1} messages with instructions"):
        response.to_chat_request()
