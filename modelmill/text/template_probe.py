"""Which forms of a message a chat template reads, found by rendering small conversations with it.

Templates differ in what they take: contents as lists of parts or as texts, calls beside a null or
beside an empty text, arguments as objects or as text. Clients send any of these. A template gets
what was sent wherever it reads that, else the other form of the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.core.errors import TemplateError
from modelmill.text.messages import join_text_parts, parse_arguments

Render = Callable[[Sequence[Mapping[str, Any]]], str]
# words that no template holds, of small letters and digits, since some templates change case or
# shorten identifiers
_ONE, _TWO, _NAME, _KEY, _ID = "qzx7one", "qzx7two", "qzx7name", "qzx7key", "qzx7ident"
_OBJECT = {_KEY: "v"}
_TEXT = json.dumps(_OBJECT)
_USER, _RESULT = (
    {"role": "user", "content": "u"},
    {"role": "tool", "tool_call_id": _ID, "content": "r"},
)


@dataclass(frozen=True)
class CallContentForms:
    """null, empty: a call survives beside such a content.

    text, object: it survives with such arguments.
    """

    null: bool
    empty: bool
    text: bool
    object: bool


def accepts_parts(render: Render, role: str) -> bool:
    """Whether a template writes all parts of a list, as it writes a text, in messages of a role."""
    one, two = ({"type": "text", "text": text} for text in (_ONE, _TWO))
    for _ in range(2):  # some templates write the time
        single = _try_render(render, _conversation_around(role, [one]))
        if single is not None and single == _try_render(render, _conversation_around(role, _ONE)):
            break
    else:
        return False
    both = _try_render(render, _conversation_around(role, [one, two])) or ""
    return _TWO in both.partition(_ONE)[2]


def probe_call_forms(render: Render) -> CallContentForms:
    """Which forms of a message with calls a template writes whole."""
    found = {
        (content, argument_form)
        for content in (None, "")
        for argument_form, arguments in (("text", _TEXT), ("object", _OBJECT))
        if _renders_call(render, content, arguments)
    }
    contents, argument_forms = (
        {content for content, _ in found},
        {argument_form for _, argument_form in found},
    )
    return CallContentForms(
        None in contents, "" in contents, "text" in argument_forms, "object" in argument_forms
    )


def adapt_messages(
    messages: Sequence[Mapping[str, Any]],
    parts: Callable[[str], bool],
    calls: Callable[[], CallContentForms],
) -> list[dict[str, Any]]:
    """Messages as sent (``messages.checked``) in the forms that a template reads.

    parts: of a role; both asked late.
    """
    return [_adapt_message(message, parts, calls) for message in messages]


def _adapt_message(
    message: Mapping[str, Any], parts: Callable[[str], bool], calls: Callable[[], CallContentForms]
) -> dict[str, Any]:
    out = dict(message)
    content = out["content"]
    if isinstance(content, list) and not parts(out["role"]):
        content = join_text_parts(content)
    if out.get("tool_calls"):
        forms = calls()
        if content is None and not forms.null:  # templates that write no calls read a text, too
            content = ""
        elif content == "" and forms.null and not forms.empty:
            content = None
        out["tool_calls"] = [_adapt_call(call, forms) for call in out["tool_calls"]]
    out["content"] = content
    return out


def _adapt_call(call: Mapping[str, Any], forms: CallContentForms) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        if forms.object and not forms.text:
            arguments = parse_arguments(arguments)
    elif forms.text and not forms.object:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _conversation_around(role: str, content: Any) -> list[Mapping[str, Any]]:
    """A conversation that a strict template takes, with a message of that role and content."""
    message = {"role": role, "content": content}
    if role == "user":
        return [message]
    if role == "system":
        return [message, _USER]
    if role == "assistant":
        return [_USER, message, _USER]
    return [_USER, _call_message("", _OBJECT), {**message, "tool_call_id": _ID}]


def _call_message(content: str | None, arguments: Any) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": _ID, "type": "function", "function": function}],
    }


def _renders_call(render: Render, content: str | None, arguments: Any) -> bool:
    """Whether the text has a call: name and arguments as JSON or text, not as Python's repr."""
    text = _try_render(render, [_USER, _call_message(content, arguments), _RESULT])
    if text is None or _NAME not in text or _KEY not in text:
        return False
    twice = f'\\"{_KEY}' in text
    python = f"'{_KEY}'" in text or (content is None and "None" in text)
    return not twice and not python


def _try_render(render: Render, messages: Sequence[Mapping[str, Any]]) -> str | None:
    try:
        return render(messages)
    except TemplateError:
        return None
