"""Writes answers as the model does: the inverse of ``answer_parser``.

A parsed answer is written back byte for byte if the model wrote it in its format's own form. JSON
arguments and their numbers keep the text that the model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from modelmill.text import harmony
from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall
from modelmill.text.chat_syntax import (
    NO_MARKS,
    CallSyntax,
    ChatSyntax,
    ParameterSyntax,
    ThinkingSyntax,
)
from modelmill.text.json_normalizer import split_json_object
from modelmill.text.parameter_types import json_type_of_text
from modelmill.text.tag_values import LIST_ITEM_TAG

_STRING_OR_CONSTANT_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"|\b(?:true|false|null)\b', re.DOTALL)
_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}


def render_answer(
    syntax: ChatSyntax,
    answer: ParsedAnswer,
    *,
    thinking: ThinkingSyntax | None = None,
    thinks: bool = False,
) -> str:
    """Return the text of an answer.

    Args:
        syntax: how it is written.
        answer: the answer.
        thinking: marks of the thinking; None: the thinking is left out.
        thinks: whether the prompt began the thinking already.
    """
    if syntax.calls.style == "harmony":
        return _render_harmony_messages(answer)
    text = ""
    if thinking is not None and (answer.reasoning or thinks):
        text = ("" if thinks else thinking.open) + answer.reasoning + thinking.close
    content = _render_content(syntax, answer.content)
    calls = render_call_section(syntax.calls, answer)
    return (text + content + calls).removeprefix(syntax.begun)


def _render_content(syntax: ChatSyntax, content: str) -> str:
    opening, closing = syntax.content
    return f"{opening}{content}{closing}" if content or closing else ""


def render_call_section(calls: CallSyntax, answer: ParsedAnswer) -> str:
    """Return the text of the calls, with what separates them from the content."""
    if not answer.calls:
        return ""
    before = calls.content_end if answer.content else ""
    written = (render_call(calls, call, index) for index, call in enumerate(answer.calls))
    section = len(answer.calls) > 1 or not calls.section_if_several
    opening, closing = calls.section if section else NO_MARKS
    return before + opening + calls.separator.join(written) + closing


def render_call(calls: CallSyntax, call: ParsedToolCall, index: int = 0) -> str:
    """Return the text of one call; index: its number in the answer."""
    opening, closing = calls.call
    if calls.style == "json":
        name = json.dumps(call.name, ensure_ascii=False)
        number = f'"{calls.number_key}": "{index}", ' if calls.number_key else ""
        keys = f'"{calls.name_key}": {name}, "{calls.arguments_key}": {call.arguments}'
        body = f"{{{number}{keys}}}"
        return opening + body + closing
    if calls.style == "pythonic":
        pairs = split_json_object(call.arguments) or []
        members = (f"{key}={json_to_python_literal(value)}" for key, value in pairs)
        return f"{call.name}({', '.join(members)})"
    head = _render_call_head(calls, call, index)
    if calls.style == "parameters":
        body = _render_parameters(calls, call)
    elif calls.style == "tags":
        body = json_to_nested_tags(call.arguments, calls.tag_prefix)
    else:
        body = json_to_gemma_syntax(call.arguments, calls.string_mark)
    return opening + head + calls.name_end + body + closing


def _render_call_head(calls: CallSyntax, call: ParsedToolCall, index: int) -> str:
    if calls.id_from_head and re.fullmatch(calls.head_pattern, call.id):
        match = re.fullmatch(calls.head_pattern, call.id)
        if match and match["name"] == call.name:
            return call.id
    name = escape_attribute(calls, call.name)
    return calls.head.format(name=name, index=index, number=index + 1, id=call.id)


def _render_parameters(calls: CallSyntax, call: ParsedToolCall) -> str:
    parameter = calls.parameter
    assert parameter is not None, "this style has marks of an argument"
    parts = []
    for key, value in split_json_object(call.arguments) or []:
        is_string = value[:1] == '"'
        attribute = _render_type_attribute(parameter, value)
        text = json.loads(value) if is_string else value
        head = f"{parameter.open}{escape_attribute(calls, key)}{attribute}{parameter.key_end}"
        parts.append(f"{head}{text}{parameter.close}")
    return "".join(parts)


def escape_attribute(calls: CallSyntax, text: str) -> str:
    """Return a name or a key as it is written."""
    if calls.parameter is None or not calls.parameter.escaped:
        return text
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _render_type_attribute(parameter: ParameterSyntax, value: str) -> str:
    """What follows a key, up to the mark after it."""
    value_type = json_type_of_text(value)
    if parameter.type_open:
        return parameter.type_open + value_type
    if parameter.type_attribute == "type":
        return f'" type="{"number" if value_type == "integer" else value_type}"'
    if parameter.type_attribute == "string":
        return f'" string="{"true" if value_type == "string" else "false"}'
    return ""


def json_to_python_literal(value: str) -> str:
    """Convert JSON text to a Python literal; all but the three constants stays as it is."""
    return _STRING_OR_CONSTANT_PATTERN.sub(
        lambda match: _PYTHON_WORDS.get(match[0], match[0]), value
    )


def json_to_nested_tags(value: str, prefix: str) -> str:
    """Convert a JSON object to nested tags, each behind a prefix (MiniMax M3)."""
    # numbers keep the text that the model wrote
    return _render_nested_tags(json.loads(value, parse_int=str, parse_float=str), prefix)


def _render_nested_tags(value: Any, prefix: str) -> str:
    if isinstance(value, Mapping):
        members = [*value.items()]
    elif isinstance(value, list):
        members = [(LIST_ITEM_TAG, each) for each in value]
    else:
        return value if isinstance(value, str) else json.dumps(value)
    return "".join(
        f"{prefix}<{key}>{_render_nested_tags(each, prefix)}{prefix}</{key}>"
        for key, each in members
    )


def json_to_gemma_syntax(value: str, string_mark: str) -> str:
    """Convert JSON text to a value with marked strings and bare keys (Gemma)."""
    if not string_mark:
        return value
    return _render_gemma_value(json.loads(value), string_mark)


def _render_gemma_value(value: Any, mark: str) -> str:
    if isinstance(value, Mapping):
        return (
            "{"
            + ",".join(f"{key}:{_render_gemma_value(item, mark)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(_render_gemma_value(item, mark) for item in value) + "]"
    return f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value)


def _render_harmony_messages(answer: ParsedAnswer) -> str:
    """Messages of gpt-oss; the prompt began the first one with <|start|>assistant."""
    messages = []
    if answer.reasoning:
        messages.append(f"{harmony.CHANNEL_TOKEN}analysis{harmony.MESSAGE_TOKEN}{answer.reasoning}")
    if answer.content or not (answer.calls or answer.reasoning):
        channel = "commentary" if answer.calls else "final"
        messages.append(f"{harmony.CHANNEL_TOKEN}{channel}{harmony.MESSAGE_TOKEN}{answer.content}")
    text = f"{harmony.END_TOKEN}{harmony.START_TOKEN}assistant".join(messages)
    for call in answer.calls:
        if text:
            end = harmony.CALL_TOKEN if call is not answer.calls[0] else harmony.END_TOKEN
            text += f"{end}{harmony.START_TOKEN}assistant"
        text += (
            f"{harmony.CHANNEL_TOKEN}commentary to=functions.{call.name} "
            f"{harmony.CONSTRAIN_TOKEN}json{harmony.MESSAGE_TOKEN}{call.arguments}"
        )
    return text
