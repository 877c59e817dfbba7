"""Tools of type custom, whose input is a text: functions with one string for the model.

The model is offered a function with the parameter ``input``; a call of it comes back as a call of
the custom tool, with the text alone. In a stream the text follows as a whole, since its characters
are escaped in the JSON that the model writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from modelmill.core.errors import RequestError
from modelmill.core.quoting import truncate_to_one_line
from modelmill.core.types import Grammar
from modelmill.text.answer_pieces import ParsedToolCall, ToolCallDelta, make_openai_tool_call
from modelmill.text.grammar import check_grammar


def input_schema(pattern: str | None = None) -> dict[str, Any]:
    """The parameters of the function; pattern: what the text matches."""
    text = {"type": "string", **({} if pattern is None else {"pattern": pattern})}
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


def check_regex_syntax(regex: str) -> None:
    """Check that a regular expression is one, in Python's notation or the grammar library's.

    Raises:
        RequestError: it is one of neither; the message has Python's reason.
    """
    try:
        re.compile(regex)
    except (re.error, OverflowError, RecursionError) as error:
        try:
            check_grammar(Grammar("regex", _without_anchors(regex)))
        except RequestError:
            raise RequestError(
                f"tools: a regex of a format is malformed: {truncate_to_one_line(str(error), 200)}"
            ) from None


def _without_anchors(regex: str) -> str:
    body = regex.removeprefix("^")
    return body[:-1] if body.endswith("$") and not body.endswith("\\$") else body


def enforceable_pattern(regex: str) -> str | None:
    """The pattern of a text that a regular expression matches as a whole.

    Returns:
        None if the grammar library cannot enforce it.
    """
    body = _without_anchors(regex)
    pattern = f"^(?:{body})$"
    try:
        check_grammar(Grammar("regex", body))  # a group must not end before its end
        check_grammar(Grammar("json", json.dumps(input_schema(pattern))))
    except RequestError:
        return None
    return pattern


def parse_custom_input(arguments: str) -> str:
    """The text of a call; of one that was cut off, what is there."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return ""
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else ""


def tool_call_json(call: ParsedToolCall, custom_tool_names: Collection[str]) -> dict[str, Any]:
    """A complete call of a message, as OpenAI writes it."""
    if call.name in custom_tool_names:
        custom = {"name": call.name, "input": parse_custom_input(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}
    return make_openai_tool_call(call.id, call.name, call.arguments)


def as_function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier call of a custom tool as the call of its function; others stay as they are."""
    custom = call.get("custom")
    if call.get("type") != "custom" or not isinstance(custom, Mapping):
        return dict(call)
    return custom_function_call(call.get("id"), custom.get("name"), custom.get("input"))


def custom_function_call(id: Any, name: Any, text: Any) -> dict[str, Any]:
    """An earlier call of a custom tool with this text, as the call of its function."""
    return make_openai_tool_call(id, name, json.dumps({"input": text}, ensure_ascii=False))


class ToolCallDeltaFormatter:
    """Formats the deltas of the calls of one choice."""

    def __init__(self, custom_tool_names: Collection[str]) -> None:
        self._custom_names = custom_tool_names
        self._open: ToolCallDelta | None = None
        self._arguments: list[str] = []

    def format(self, parts: Sequence[ToolCallDelta], ended: bool) -> list[dict[str, Any]]:
        """The deltas as events have them; ended: no further parts follow."""
        out: list[dict[str, Any]] = []
        for part in parts:
            if part.name is not None:
                out += self._flush_custom_call()
            if part.name in self._custom_names:
                self._open = part
                head = {"index": part.index, "id": part.id, "type": "custom"}
                out.append({**head, "custom": {"name": part.name, "input": ""}})
            if self._open is not None and part.index == self._open.index:
                self._arguments.append(part.arguments)
            else:
                out.append(_function_delta(part))
        return out + (self._flush_custom_call() if ended else [])

    def _flush_custom_call(self) -> list[dict[str, Any]]:
        call, text = self._open, parse_custom_input("".join(self._arguments))
        self._open, self._arguments = None, []
        if call is None or not text:
            return []
        return [{"index": call.index, "custom": {"input": text}}]


def _function_delta(part: ToolCallDelta) -> dict[str, Any]:
    """A delta of a function call: the first one has its id and name."""
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index, **make_openai_tool_call(part.id, part.name, part.arguments)}
