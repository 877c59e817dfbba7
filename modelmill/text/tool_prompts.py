"""Tools in prompts: tool definitions, earlier calls and results of a conversation as text.

There are five styles of tool calls:

* ``marked``: <tool_call>{"name", "arguments"}</tool_call> (Qwen 2.5 and later, Hermes);
* ``bare``: the answer is {"name", "parameters"}, or follows <|python_tag|> (Llama 3);
* ``listed``: [TOOL_CALLS] and a list of objects, or name[ARGS]object (Mistral);
* ``react``: Thought, Action, Action Input, Observation, a line each (Qwen v1; text/react.py);
* ``described``: for chat formats without tools: the system message explains the marked form, and
  earlier calls and results are written in it.

text/tool_parser.py parses calls of an answer; text/tool_grammar.py makes the grammar of forced
calls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.text.messages import validate_messages

MARKED_STYLE = "marked"
BARE_STYLE = "bare"
LISTED_STYLE = "listed"
REACT_STYLE = "react"
DESCRIBED_STYLE = "described"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_MARK = "<|python_tag|>"
CALL_LIST_MARK, CALL_ARGS_MARK, CALL_ID_MARK = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
CALL_MARKS = (CALL_OPEN, CALL_CLOSE, PYTHON_MARK, CALL_LIST_MARK, CALL_ARGS_MARK, CALL_ID_MARK)
"""Control tokens that a tool parser needs in the text; plain answers omit them."""
OBSERVATION = "Observation:"
INTRO = """You may call functions to help with the user's query. Their signatures, in JSON:
<tools>
{tools}
</tools>
For each call write a JSON object with its name and arguments inside these tags:
<tool_call>
{{"name": FUNCTION, "arguments": OBJECT}}
</tool_call>"""


def detect_tool_style(templates: str) -> str:
    """Return the style in which chat templates write calls."""
    if "tools" not in templates:
        return DESCRIBED_STYLE
    if CALL_LIST_MARK in templates:
        return LISTED_STYLE
    return MARKED_STYLE if CALL_OPEN in templates else BARE_STYLE


def prepare_tools(
    style: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    writes_calls: bool = False,
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Convert a conversation with tools for a chat format of this style.

    A conversation without tools, calls and results is unchanged.

    Args:
        style: how the chat format writes calls.
        messages: the conversation, as sent.
        tools: definitions of the tools.
        writes_calls: whether the format writes earlier calls, even if it does not write tools.

    Returns:
        The conversation and variables for the template.

    Raises:
        RequestError: if a message is invalid.
    """
    if not tools and not any(
        message.get("role") == "tool" or message.get("tool_calls") for message in messages
    ):
        return list(messages), {}
    if style == DESCRIBED_STYLE and (tools or not writes_calls):
        return list(describe_tools(messages, tools)), {}
    out = validate_messages(messages, as_sent=True)
    if style in (BARE_STYLE, REACT_STYLE):
        out = split_parallel_calls(out)
    if style == LISTED_STYLE:
        out = [_shorten_ids(message) for message in out]
    return list(out), {"tools": list(tools)} if tools else {}


def tool_stop_strings(style: str) -> tuple[str, ...]:
    """Return the stop strings of an answer with calls: a result would follow them."""
    return (OBSERVATION,) if style == REACT_STYLE else ()


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Convert a conversation for a chat format without tools.

    The system message describes the tools; calls and results become text.

    Raises:
        RequestError: if a message is invalid.
    """
    intro = (
        INTRO.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if tools
        else ""
    )
    out = [_message_as_text(message) for message in validate_messages(messages)]
    if not intro:
        return out
    if out[0]["role"] == "system":
        out[0]["content"] = f"{out[0]['content']}\n\n{intro}"
        return out
    return [{"role": "system", "content": intro}, *out]


def _message_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a validated message to plain text."""
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    if not message.get("tool_calls"):
        return dict(message)
    blocks = []
    for call in message["tool_calls"]:
        name = json.dumps(call["function"]["name"], ensure_ascii=False)
        blocks.append(
            f'{CALL_OPEN}\n{{"name": {name}, "arguments": {arguments_json(call)}}}\n{CALL_CLOSE}'
        )
    return {
        "role": message["role"],
        "content": "\n".join(filter(None, [message["content"], *blocks])),
    }


def arguments_json(call: Mapping[str, Any]) -> str:
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


def _shorten_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten call ids to the nine letters and digits that Mistral's templates require."""
    out = dict(message)
    if "tool_call_id" in out:
        out["tool_call_id"] = _short_id(out["tool_call_id"])
    if out.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "id": _short_id(str(call.get("id", "")))} for call in out["tool_calls"]
        ]
    return out


def _short_id(id: str) -> str:
    fits = len(id) == 9 and id.isascii() and id.isalnum()
    return id if fits else hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:9]
