"""Tools in prompts: tool definitions, earlier calls and results of a conversation as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from modelmill.core.types import SamplingParams
from modelmill.text.answer_pieces import SHORT_ID_CHARS, ParsedAnswer, ParsedToolCall
from modelmill.text.answer_renderer import render_answer
from modelmill.text.chat_format_registry import NO_TOOLS_CHAT_FORMAT, load_chat_syntax
from modelmill.text.message_validation import validate_and_normalize_messages

OBSERVATION_LABEL = "Observation:"
TOOLS_SYSTEM_PROMPT = """\
You may call functions to help with the user's query. Their signatures, in JSON:
<tools>
{tools}
</tools>
For each call write a JSON object with its name and arguments inside these tags:
<tool_call>
{{"name": FUNCTION, "arguments": OBJECT}}
</tool_call>"""


def prepare_tool_conversation(
    format_name: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    writes_calls: bool = False,
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Convert a conversation with tools for a chat format.

    A conversation without tools, calls and results is unchanged.

    Args:
        format_name: of the chat format.
        messages: the conversation, as sent.
        tools: definitions of the tools.
        writes_calls: whether the template writes earlier calls, even if it does not write tools.

    Returns:
        The conversation and variables for the template.

    Raises:
        RequestError: if a message is invalid.
    """
    if not tools and not any(
        message.get("role") == "tool" or message.get("tool_calls") for message in messages
    ):
        return list(messages), {}
    if format_name == NO_TOOLS_CHAT_FORMAT and (tools or not writes_calls):
        return list(convert_tool_conversation_to_text(messages, tools)), {}
    calls = load_chat_syntax(format_name).calls
    out = validate_and_normalize_messages(messages, as_sent=True)
    if calls.one_per_message:
        out = split_parallel_calls(out)
    if calls.short_ids:
        out = [_shorten_call_ids(message) for message in out]
    return list(out), {"tools": list(tools)} if tools else {}


def tool_schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The names of tools in OpenAI's form, with the schemas of their parameters."""
    functions = [tool["function"] for tool in tools]
    # without parameters a function takes none
    return {function["name"]: function.get("parameters") or {} for function in functions}


def add_call_stop_strings(params: SamplingParams, format_name: str) -> SamplingParams:
    """The parameters of an answer that may have calls: the format's ends of calls stop it."""
    stops = load_chat_syntax(format_name).calls.stops
    return replace(params, stop=tuple(dict.fromkeys((*params.stop, *stops))))


def convert_tool_conversation_to_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Convert a conversation for a chat format without tools.

    The system message describes the tools; calls and results become text.

    Raises:
        RequestError: if a message is invalid.
    """
    intro = (
        TOOLS_SYSTEM_PROMPT.format(
            tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        )
        if tools
        else ""
    )
    out = [
        _tool_message_to_text_message(message)
        for message in validate_and_normalize_messages(messages)
    ]
    if not intro:
        return out
    if out[0]["role"] == "system":
        out[0]["content"] = f"{out[0]['content']}\n\n{intro}"
        return out
    return [{"role": "system", "content": intro}, *out]


def _tool_message_to_text_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a validated message to plain text."""
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    if not message.get("tool_calls"):
        return dict(message)
    calls = (
        ParsedToolCall("", call["function"]["name"], call_arguments_json(call))
        for call in message["tool_calls"]
    )
    answer = ParsedAnswer(message["content"], tuple(calls))
    return {
        "role": message["role"],
        "content": render_answer(load_chat_syntax(NO_TOOLS_CHAT_FORMAT), answer),
    }


def call_arguments_json(call: Mapping[str, Any]) -> str:
    """Return the arguments of a validated call as JSON text; a string is returned unchanged."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def split_parallel_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split parallel calls into one call per message, each followed by its result.

    Some chat formats allow one call per turn.
    """
    out: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            out.append(message)
            continue
        results = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        later = None if message["content"] is None else ""
        for number, call in enumerate(calls):
            out.append(
                {
                    **message,
                    "content": message["content"] if number == 0 else later,
                    "tool_calls": [call],
                }
            )
            own_result = next((r for r in results if r.get("tool_call_id") == call.get("id")), None)
            if own_result is not None:
                results.remove(own_result)
                out.append(own_result)
        out += results
    return out


def _shorten_call_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten call ids to those that Mistral's templates require."""
    out = dict(message)
    if "tool_call_id" in out:
        out["tool_call_id"] = _short_call_id(out["tool_call_id"])
    if out.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "id": _short_call_id(str(call.get("id", "")))} for call in out["tool_calls"]
        ]
    return out


def _short_call_id(id: str) -> str:
    if len(id) == SHORT_ID_CHARS and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:SHORT_ID_CHARS]
