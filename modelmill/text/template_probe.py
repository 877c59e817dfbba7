"""Which forms of a message a chat template accepts, found by rendering small conversations.

Templates differ in the forms they accept: contents as lists of parts or as strings, calls with a
null or an empty content, arguments as objects or as strings. Clients send any of these. A template
gets the form that was sent if it accepts that, else the other form of the same message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.core.errors import TemplateError
from modelmill.text.message_validation import join_text_parts, parse_arguments_or_keep_text

Render = Callable[[Sequence[Mapping[str, Any]]], str]
# words that occur in no template; lowercase letters and digits, since some templates change case
# or shorten identifiers
_PROBE_TEXT_1 = "qzx7one"
_PROBE_TEXT_2 = "qzx7two"
_PROBE_FUNCTION_NAME = "qzx7name"
_PROBE_ARGUMENT_NAME = "qzx7key"
_PROBE_CALL_ID = "qzx7ident"
_PROBE_ARGUMENTS = {_PROBE_ARGUMENT_NAME: "v"}
_PROBE_ARGUMENTS_JSON = json.dumps(_PROBE_ARGUMENTS)
_PROBE_USER_MESSAGE, _PROBE_TOOL_MESSAGE = (
    {"role": "user", "content": "u"},
    {"role": "tool", "tool_call_id": _PROBE_CALL_ID, "content": "r"},
)


@dataclass(frozen=True)
class AcceptedCallForms:
    """Forms of a message with tool calls that a template renders completely.

    Attributes:
        null: a null content.
        empty: an empty content.
        text: arguments as a JSON string.
        object: arguments as an object.
    """

    null: bool
    empty: bool
    text: bool
    object: bool


def template_accepts_text_parts(render: Render, role: str) -> bool:
    """Return whether a template renders a list of text parts like a string, for a role."""
    one, two = ({"type": "text", "text": text} for text in (_PROBE_TEXT_1, _PROBE_TEXT_2))
    for _ in range(2):  # some templates render the current time
        single = _try_render(render, _conversation_around(role, [one]))
        if single is not None and single == _try_render(
            render, _conversation_around(role, _PROBE_TEXT_1)
        ):
            break
    else:
        return False
    both = _try_render(render, _conversation_around(role, [one, two])) or ""
    return _PROBE_TEXT_2 in both.partition(_PROBE_TEXT_1)[2]


def probe_call_forms(render: Render) -> AcceptedCallForms:
    """Return the forms of a message with calls that a template renders completely."""
    forms = {
        (content, argument_form)
        for content in (None, "")
        for argument_form, arguments in (
            ("text", _PROBE_ARGUMENTS_JSON),
            ("object", _PROBE_ARGUMENTS),
        )
        if _renders_call(render, content, arguments)
    }
    contents, argument_forms = (
        {content for content, _ in forms},
        {argument_form for _, argument_form in forms},
    )
    return AcceptedCallForms(
        None in contents, "" in contents, "text" in argument_forms, "object" in argument_forms
    )


def adapt_messages(
    messages: Sequence[Mapping[str, Any]],
    parts: Callable[[str], bool],
    calls: Callable[[], AcceptedCallForms],
) -> list[dict[str, Any]]:
    """Convert validated messages to the forms that a template accepts.

    Args:
        messages: from ``validate_and_normalize_messages(…, as_sent=True)``.
        parts: whether the template accepts lists of parts in messages of a role; called only if a
            message has such a list.
        calls: the accepted forms of tool calls; called only if a message has one.
    """
    return [_adapt_message(message, parts, calls) for message in messages]


def _adapt_message(
    message: Mapping[str, Any], parts: Callable[[str], bool], calls: Callable[[], AcceptedCallForms]
) -> dict[str, Any]:
    out = dict(message)
    content = out["content"]
    if isinstance(content, list) and not parts(out["role"]):
        content = join_text_parts(content)
    if out.get("tool_calls"):
        forms = calls()
        if content is None and not forms.null:  # templates without calls accept a string, too
            content = ""
        elif content == "" and forms.null and not forms.empty:
            content = None
        out["tool_calls"] = [_adapt_call(call, forms) for call in out["tool_calls"]]
    out["content"] = content
    return out


def _adapt_call(call: Mapping[str, Any], forms: AcceptedCallForms) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        if forms.object and not forms.text:
            arguments = parse_arguments_or_keep_text(arguments)
    elif forms.text and not forms.object:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _conversation_around(role: str, content: Any) -> list[Mapping[str, Any]]:
    """Return a conversation with such a message that strict templates accept, too."""
    message = {"role": role, "content": content}
    if role == "user":
        return [message]
    if role == "system":
        return [message, _PROBE_USER_MESSAGE]
    if role == "assistant":
        return [_PROBE_USER_MESSAGE, message, _PROBE_USER_MESSAGE]
    return [
        _PROBE_USER_MESSAGE,
        _make_call_message("", _PROBE_ARGUMENTS),
        {**message, "tool_call_id": _PROBE_CALL_ID},
    ]


def _make_call_message(content: str | None, arguments: Any) -> dict[str, Any]:
    function = {"name": _PROBE_FUNCTION_NAME, "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": _PROBE_CALL_ID, "type": "function", "function": function}],
    }


def _renders_call(render: Render, content: str | None, arguments: Any) -> bool:
    """Whether the rendered text has the call's name and arguments as JSON, not as a Python repr."""
    text = _try_render(
        render, [_PROBE_USER_MESSAGE, _make_call_message(content, arguments), _PROBE_TOOL_MESSAGE]
    )
    if text is None or _PROBE_FUNCTION_NAME not in text or _PROBE_ARGUMENT_NAME not in text:
        return False
    escaped_twice = f'\\"{_PROBE_ARGUMENT_NAME}' in text
    python_repr = f"'{_PROBE_ARGUMENT_NAME}'" in text or (content is None and "None" in text)
    return not escaped_twice and not python_repr


def _try_render(render: Render, messages: Sequence[Mapping[str, Any]]) -> str | None:
    try:
        return render(messages)
    except TemplateError:
        return None
