"""Keys that messages bring back from answers of this and other servers.

Clients send the messages of an answer again as they came, with keys that say nothing to a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationError
from pydantic_core import InitErrorDetails

from modelmill.serve.custom_tools import as_function_call
from modelmill.serve.strict_models import JsonObjectList, is_utf8_encodable

DROPPED_MESSAGE_KEYS = frozenset(
    (
        "annotations", "audio", "cache_control", "citations", "function_call", "id", "parsed",
        "provider_specific_fields", "reasoning_details", "reasoning_items", "refusal",
        "thinking_blocks", "metadata", "prefix",
    )
)  # fmt: skip
"""Keys of messages that are accepted and ignored."""


def clean_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the keys of round trips; ``reasoning`` becomes ``reasoning_content``.

    A refusal is the text of its message, and an answer without any text is empty.

    Raises:
        ValueError: a message has a call in OpenAI's older form, or begins the answer as in
            Mistral's and DeepSeek's APIs, which would be lost; or a text has an unpaired
            surrogate, which no tokenizer encodes.
    """
    _check_texts_utf8_encodable(messages)
    return [_clean_message(message) for message in messages]


def _check_texts_utf8_encodable(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise pydantic's error of a string for the first text that UTF-8 cannot encode."""
    for index, message in enumerate(messages):
        for path, text in _iter_texts_with_paths(message):
            if not is_utf8_encodable(text):
                error = InitErrorDetails(type="string_unicode", loc=(index, *path), input=None)
                raise ValidationError.from_exception_data("messages", [error])


def _iter_texts_with_paths(
    message: Mapping[str, Any],
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """(path, text) of what a chat template may write of a message, but for calls."""
    for name in ("content", "reasoning", "reasoning_content", "refusal"):
        value = message.get(name)
        if isinstance(value, str):
            yield (name,), value
        elif name == "content" and isinstance(value, list):
            for index, part in enumerate(value):
                text = part.get("text") if isinstance(part, dict) else None
                if isinstance(text, str):
                    yield (name, index, "text"), text


def _clean_message(message: dict[str, Any]) -> dict[str, Any]:
    is_answer = message.get("role") == "assistant"
    if message.get("function_call"):
        raise ValueError("function_call is not supported; send tool_calls")
    if message.get("prefix"):
        raise ValueError(
            "prefix is not supported; send continue_final_message: true beside the messages, and "
            "the last of them is the beginning of the answer"
        )
    if is_answer and isinstance(message.get("content"), list):
        message = {
            **message,
            "content": [_refusal_to_text_part(part) for part in message["content"]],
        }
    calls = message.get("tool_calls")
    is_empty = is_answer and message.get("content") is None and not calls
    if isinstance(calls, list) and any(isinstance(c, dict) and c.get("custom") for c in calls):
        converted = [as_function_call(c) if isinstance(c, dict) else c for c in calls]
        message = {**message, "tool_calls": converted}
    if not is_empty and "reasoning" not in message and DROPPED_MESSAGE_KEYS.isdisjoint(message):
        return message
    out = {key: value for key, value in message.items() if key not in DROPPED_MESSAGE_KEYS}
    reasoning = out.pop("reasoning", None)
    if isinstance(reasoning, str) and not out.get("reasoning_content"):
        out["reasoning_content"] = reasoning
    if is_empty:
        refusal = message.get("refusal")
        out["content"] = refusal if isinstance(refusal, str) else ""
    return out


def _refusal_to_text_part(part: Any) -> Any:
    """A refusal in a list of parts as a text; another part as it is."""
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part


ChatMessages = Annotated[JsonObjectList, AfterValidator(clean_messages)]
"""The messages of a request, without the keys of round trips."""
