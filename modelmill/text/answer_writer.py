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
from modelmill.text.parameter_types import json_type
from modelmill.text.tag_values import ITEM
from modelmill.text.value_stream import split_object

_OUTSIDE_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"|\b(?:true|false|null)\b', re.DOTALL)
_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}


def write_answer(
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
        return _write_harmony_messages(answer)
    text = ""
    if thinking is not None and (answer.reasoning or thinks):
        text = ("" if thinks else thinking.open) + answer.reasoning + thinking.close
    content = _write_content(syntax, answer.content)
    calls = write_calls(syntax.calls, answer)
    return (text + content + calls).removeprefix(syntax.begun)


def _write_content(syntax: ChatSyntax, content: str) -> str:
    opening, closing = syntax.content
    return f"{opening}{content}{closing}" if content or closing else ""


def write_calls(calls: CallSyntax, answer: ParsedAnswer) -> str:
    """Return the text of the calls, with what separates them from the content."""
    if not answer.calls:
        return ""
    before = calls.content_end if answer.content else ""
    written = (write_call(calls, call, index) for index, call in enumerate(answer.calls))
    section = len(answer.calls) > 1 or not calls.section_if_several
    opening, closing = calls.section if section else NO_MARKS
    return before + opening + calls.separator.join(written) + closing


def write_call(calls: CallSyntax, call: ParsedToolCall, index: int = 0) -> str:
    """Return the text of one call; index: its number in the answer."""
    opening, closing = calls.call
    if calls.style == "json":
        name = json.dumps(call.name, ensure_ascii=False)
        number = f'"{calls.number_key}": "{index}", ' if calls.number_key else ""
        keys = f'"{calls.name_key}": {name}, "{calls.arguments_key}": {call.arguments}'
        body = f"{{{number}{keys}}}"
        return opening + body + closing
    if calls.style == "pythonic":
        pairs = split_object(call.arguments) or []
        return f"{call.name}({', '.join(f'{key}={to_python(value)}' for key, value in pairs)})"
    head = _write_head(calls, call, index)
    if calls.style == "parameters":
        body = _write_parameters(calls, call)
    elif calls.style == "tags":
        body = to_tags(call.arguments, calls.tag_prefix)
    else:
        body = to_marked_strings(call.arguments, calls.string_mark)
    return opening + head + calls.name_end + body + closing


def _write_head(calls: CallSyntax, call: ParsedToolCall, index: int) -> str:
    if calls.id_from_head and re.fullmatch(calls.head_pattern, call.id):
        match = re.fullmatch(calls.head_pattern, call.id)
        if match and match["name"] == call.name:
            return call.id
    name = escape_attribute(calls, call.name)
    return calls.head.format(name=name, index=index, number=index + 1, id=call.id)


def _write_parameters(calls: CallSyntax, call: ParsedToolCall) -> str:
    parameter = calls.parameter
    assert parameter is not None, "this style has marks of an argument"
    parts = []
    for key, value in split_object(call.arguments) or []:
        is_string = value[:1] == '"'
        attribute = _write_attribute(parameter, value)
        text = json.loads(value) if is_string else value
        head = f"{parameter.open}{escape_attribute(calls, key)}{attribute}{parameter.key_end}"
        parts.append(f"{head}{text}{parameter.close}")
    return "".join(parts)


def escape_attribute(calls: CallSyntax, text: str) -> str:
    """Return a name or a key as it is written."""
    if calls.parameter is None or not calls.parameter.escaped:
        return text
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _write_attribute(parameter: ParameterSyntax, value: str) -> str:
    """What follows a key, up to the mark after it."""
    value_type = json_type(value)
    if parameter.type_open:
        return parameter.type_open + value_type
    if parameter.type_attribute == "type":
        return f'" type="{"number" if value_type == "integer" else value_type}"'
    if parameter.type_attribute == "string":
        return f'" string="{"true" if value_type == "string" else "false"}'
    return ""


def to_python(value: str) -> str:
    """Convert JSON text to a Python literal; all but the three constants stays as it is."""
    return _OUTSIDE_STRINGS.sub(lambda match: _PYTHON_WORDS.get(match[0], match[0]), value)


def to_tags(value: str, prefix: str) -> str:
    """Convert a JSON object to nested tags, each behind a prefix (MiniMax M3)."""
    # numbers keep the text that the model wrote
    return _tagged(json.loads(value, parse_int=str, parse_float=str), prefix)


def _tagged(value: Any, prefix: str) -> str:
    if isinstance(value, Mapping):
        members = [*value.items()]
    elif isinstance(value, list):
        members = [(ITEM, each) for each in value]
    else:
        return value if isinstance(value, str) else json.dumps(value)
    return "".join(
        f"{prefix}<{key}>{_tagged(each, prefix)}{prefix}</{key}>" for key, each in members
    )


def to_marked_strings(value: str, string_mark: str) -> str:
    """Convert JSON text to a value with marked strings and bare keys (Gemma)."""
    if not string_mark:
        return value
    return _marked(json.loads(value), string_mark)


def _marked(value: Any, mark: str) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_marked(item, mark)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_marked(item, mark) for item in value) + "]"
    return f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value)


def _write_harmony_messages(answer: ParsedAnswer) -> str:
    """Messages of gpt-oss; the prompt began the first one with <|start|>assistant."""
    messages = []
    if answer.reasoning:
        messages.append(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}{answer.reasoning}")
    if answer.content or not (answer.calls or answer.reasoning):
        channel = "commentary" if answer.calls else "final"
        messages.append(f"{harmony.CHANNEL}{channel}{harmony.MESSAGE}{answer.content}")
    text = f"{harmony.END}{harmony.START}assistant".join(messages)
    for call in answer.calls:
        if text:
            end = harmony.CALL if call is not answer.calls[0] else harmony.END
            text += f"{end}{harmony.START}assistant"
        text += (
            f"{harmony.CHANNEL}commentary to=functions.{call.name} "
            f"{harmony.CONSTRAIN}json{harmony.MESSAGE}{call.arguments}"
        )
    return text
