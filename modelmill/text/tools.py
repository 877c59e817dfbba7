"""Tool calls between messages and text: how a prompt tells of tools, and what an answer may be where a call is forced.

Five ways of writing a call, named after what marks it:

* ``marked``: <tool_call>{"name", "arguments"}</tool_call> (Qwen 2.5 and later, Hermes);
* ``bare``: the answer is {"name", "parameters"}, or follows <|python_tag|> (Llama 3);
* ``listed``: [TOOL_CALLS] and a list of objects, or name[ARGS]object (Mistral);
* ``react``: Thought, Action, Action Input, Observation, a line each (Qwen v1; text/react.py);
* ``told``: for chat formats that know no tools: the system message explains the marked form, and earlier calls and
  results are written out in it.

Reading calls out of an answer is text/calls.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from modelmill.core.types import Grammar
from modelmill.text.messages import checked

MARKED, BARE, LISTED, REACT, TOLD = "marked", "bare", "listed", "react", "told"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON = "<|python_tag|>"
LIST, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKS = (OPEN, CLOSE, PYTHON, LIST, ARGS, CALL_ID)
"""Control tokens that a reader of calls must see, though they are no part of a plain answer."""
OBSERVATION = "Observation:"
MOST = 16
"""Most calls of one forced answer."""
INTRO = """You may call functions to help with the user's query. Their signatures, in JSON:
<tools>
{tools}
</tools>
For each call write a JSON object with its name and arguments inside these tags:
<tool_call>
{{"name": FUNCTION, "arguments": OBJECT}}
</tool_call>"""
_MIXED = ("allOf", "if", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")


def style_of(templates: str) -> str:
    """How a chat template writes calls."""
    if "tools" not in templates:
        return TOLD
    if LIST in templates:
        return LISTED
    return MARKED if OPEN in templates else BARE


def prepared(
    style: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """(conversation, template variables) that a chat format of this style takes for a conversation and its tools.

    A conversation that has nothing to do with tools is left as it is. Raises RequestError for messages that are none.
    """
    if not tools and not any(message.get("role") == "tool" or message.get("tool_calls") for message in messages):
        return list(messages), {}
    if style == TOLD:
        return list(told(messages, tools)), {}
    out = checked(messages)
    if style in (BARE, REACT):
        out = one_by_one(out)
    if style == LISTED:
        out = [_short_ids(message) for message in out]
    return list(out), {"tools": list(tools)} if tools else {}


def stops(style: str) -> tuple[str, ...]:
    """Texts that end an answer in which calls are read: what follows would be the tool's own words."""
    return (OBSERVATION,) if style == REACT else ()


def told(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for a format without tools: they stand in the system message, calls and results in the text.

    Raises RequestError for messages that are none.
    """
    intro = INTRO.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)) if tools else ""
    out = [_plain(message) for message in checked(messages)]
    if not intro:
        return out
    if out[0]["role"] == "system":
        out[0]["content"] = f"{out[0]['content']}\n\n{intro}"
        return out
    return [{"role": "system", "content": intro}, *out]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A checked message in plain words."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    blocks = []
    for call in message["tool_calls"]:
        name = json.dumps(call["function"]["name"], ensure_ascii=False)
        blocks.append(f'{OPEN}\n{{"name": {name}, "arguments": {written(call)}}}\n{CLOSE}')
    return {"role": message["role"], "content": "\n".join(filter(None, [message["content"], *blocks]))}


def written(call: Mapping[str, Any]) -> str:
    """The arguments of a checked call as JSON; what the model wrote where that is none."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def one_by_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls that were made at once, told one after another, each with its result: some formats have one call a turn."""
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
        for number, call in enumerate(calls):
            out.append({**message, "content": message["content"] if number == 0 else "", "tool_calls": [call]})
            mine = next((r for r in results if r.get("tool_call_id") == call.get("id")), None)
            if mine is not None:
                results.remove(mine)
                out.append(mine)
        out += results
    return out


def _short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Mistral's templates take ids of nine letters and digits and no others."""
    out = dict(message)
    if "tool_call_id" in out:
        out["tool_call_id"] = _short(out["tool_call_id"])
    if out.get("tool_calls"):
        out["tool_calls"] = [{**call, "id": _short(str(call.get("id", "")))} for call in out["tool_calls"]]
    return out


def _short(id: str) -> str:
    fits = len(id) == 9 and id.isascii() and id.isalnum()
    return id if fits else hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:9]


def forced(tools: Sequence[Mapping[str, Any]], name: str | None, several: bool = False) -> Grammar:
    """An answer that is a call and nothing else: of ``name``, or of any tool. It is written bare.

    several: a list of 1 to MOST calls instead. Arguments have the properties that a function's parameters name and no
    others, unless the parameters themselves ask for others.
    """
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    shapes = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": closed(function.get("parameters")),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    shape: dict[str, Any] = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    definitions = _lifted(shapes)
    if several:
        shape = {"type": "array", "items": shape, "minItems": 1, "maxItems": MOST}
    return Grammar("json", json.dumps({**shape, **({"$defs": definitions} if definitions else {})}))


def _lifted(shapes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Take the definitions out of the parameters, where "#/$defs/…" would no longer find them.

    References are renamed, since two functions may each have a definition of one name.
    """
    found: dict[str, Any] = {}
    for number, shape in enumerate(shapes):
        parameters = shape["properties"]["arguments"]
        for key in ("$defs", "definitions"):
            inner = parameters.get(key)
            if not isinstance(inner, dict):
                continue
            old, new = f"#/{key}/", f"#/$defs/{number}."
            parameters = _renamed({k: v for k, v in parameters.items() if k != key}, old, new)
            found |= {f"{number}.{name}": _renamed(value, old, new) for name, value in inner.items()}
        shape["properties"]["arguments"] = parameters
    return found


def _renamed(schema: Any, old: str, new: str) -> Any:
    if isinstance(schema, dict):
        return {
            key: new + value.removeprefix(old)
            if key == "$ref" and isinstance(value, str) and value.startswith(old)
            else _renamed(value, old, new)
            for key, value in schema.items()
        }
    return [_renamed(each, old, new) for each in schema] if isinstance(schema, list) else schema


def closed(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Parameters whose objects have the properties that are named and no others: every such value fits the original.

    None is a function without parameters. Left as they are: objects that say themselves what else they may hold,
    and schemas that are put together of several, where closing one part would shut out the others.
    """
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    out: dict[str, Any] = dict(parameters) if _holds(parameters, _MIXED) else _closed(parameters)
    return out


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    several = "properties" in schema and any(key in schema for key in ("anyOf", "oneOf", "$ref"))
    if several:
        return dict(schema)
    out = {key: value if key in ("enum", "const", "default", "examples") else _closed(value)
           for key, value in schema.items()}  # fmt: skip
    named = isinstance(schema.get("properties"), Mapping)
    if named and not any(key in schema for key in ("additionalProperties", "patternProperties")):
        out["additionalProperties"] = False
    return out


def _holds(schema: Any, keys: Sequence[str]) -> bool:
    if isinstance(schema, Mapping):
        return any(key in schema for key in keys) or any(_holds(value, keys) for value in schema.values())
    return isinstance(schema, list) and any(_holds(each, keys) for each in schema)
