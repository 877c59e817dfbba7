"""Checks a conversation and normalizes it if requested: contents as text, calls as objects."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from modelmill.core.errors import RequestError

Messages = Sequence[Mapping[str, Any]]
"""A conversation: [{"role", "content", …}]."""

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_KEYS = (
    *("role", "content", "name", "tool_calls", "tool_call_id"),
    *("reasoning_content", "reasoning"),
)
MAX_DEPTH = 64
MAX_INTEGER_BITS = 1024  # Python refuses to print much longer ones


class ChatRenderArgs(TypedDict, total=False):
    """What a chat format renders beside the messages.

    Attributes:
        tools: function descriptions.
        options: the template's kwargs: its further variables (enable_thinking, …).
    """

    tools: Sequence[Mapping[str, Any]] | None
    options: Mapping[str, Any] | None


def validate_and_normalize_messages(
    messages: object, *, as_sent: bool = False
) -> list[dict[str, Any]]:
    """A copy of the conversation; raises RequestError naming the message that is wrong.

    "developer" becomes "system". Unless as_sent, a list of text parts becomes one text, a line
    each, null beside calls an empty text, and arguments of calls that are JSON text become objects.
    """
    validated = _validate_message_list(messages)
    return validated if as_sent else [_normalize_message(message) for message in validated]


def _validate_message_list(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError("messages must be a list of at least one message")
    return [
        _validated_message(message, f"messages[{index}]") for index, message in enumerate(messages)
    ]


def join_text_parts(parts: Sequence[Mapping[str, Any]]) -> str:
    """Join text parts, one per line, as vLLM and llama.cpp do for templates that read no lists."""
    return "\n".join(str(part["text"]) for part in parts)


def parse_arguments_or_keep_text(arguments: str) -> Any:
    """Parse a JSON object; return the text itself if it is not valid (models write such text)."""
    try:
        value = json.loads(arguments)
        check_json_data(value, "arguments")
    except (ValueError, RecursionError):  # RequestError is a ValueError
        return arguments
    return value if isinstance(value, dict) else arguments


def check_json_data(value: object, location: str, depth: int = 0) -> None:
    """Check that a value has only JSON's types.

    Raises:
        RequestError: if it has other types or is nested more than MAX_DEPTH deep.
    """
    if depth > MAX_DEPTH:
        raise RequestError(f"{location} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RequestError(f"{location} has a key that is not a string")
            check_json_data(item, location, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            check_json_data(item, location, depth + 1)
    elif not isinstance(value, str | int | float | None):
        raise RequestError(f"{location} has a {type(value).__name__}, which JSON cannot express")
    elif isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{location} has a number that is not finite, which JSON cannot express")
    elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise RequestError(f"{location} has an integer of more than {MAX_INTEGER_BITS} bits")


def _validated_message(message: object, location: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{location} must be an object with role and content")
    check_json_data(message, location)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{location}: role must be one of {', '.join(ROLES)}")
    unknown = sorted(key for key, value in message.items() if key not in MESSAGE_KEYS and value)
    if unknown:
        raise RequestError(f"{location}: unknown key {unknown[0][:40]!r}")
    result: dict[str, Any] = {"role": "system" if role == "developer" else role}
    result["content"] = _validated_content(message, location)
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise RequestError(f"{location}: {key} must be a string")
        result[key] = value
    reasoning = message.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, str):
        raise RequestError(f"{location}: reasoning must be a string")
    if reasoning:
        result.setdefault("reasoning_content", reasoning)
    if message.get("tool_calls"):
        if role != "assistant":
            raise RequestError(f"{location}: only an assistant message may have tool_calls")
        result["tool_calls"] = _validated_tool_calls(
            message["tool_calls"], f"{location}.tool_calls"
        )
    return result


def _normalize_message(message: dict[str, Any]) -> dict[str, Any]:
    """Convert contents to strings and arguments of calls to objects, in place."""
    content = message["content"]
    message["content"] = join_text_parts(content) if isinstance(content, list) else content or ""
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if isinstance(function["arguments"], str):
            function["arguments"] = parse_arguments_or_keep_text(function["arguments"])
    return message


def _validated_content(
    message: Mapping[str, Any], location: str
) -> str | list[dict[str, str]] | None:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("role") == "assistant" and message.get("tool_calls"):
        return None
    if not isinstance(content, list | tuple):
        raise RequestError(f"{location}: content must be a string or a list of text parts")
    parts: list[dict[str, str]] = []
    for index, part in enumerate(content):
        text = (
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        )
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            raise RequestError(
                f"{location}.content[{index}]: the model has no vision encoder; give text only"
            )
        if not isinstance(text, str):
            raise RequestError(f'{location}.content[{index}] must be {{"type": "text", "text": …}}')
        parts.append({"type": "text", "text": text})
    return parts


def _validated_tool_calls(calls: object, location: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{location} must be a list")
    result: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{location}[{index}] must have a function with a name")
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str | Mapping):
            raise RequestError(f"{location}[{index}]: arguments must be a JSON string or an object")
        kept = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
        result.append({**kept, "function": {"name": function["name"], "arguments": arguments}})
    return result
