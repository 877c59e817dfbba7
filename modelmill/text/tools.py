"""Tool calls between messages and text: how a prompt tells of tools, and how calls are read out of an answer.

Three ways of writing a call: ``marked`` (<tool_call>{"name", "arguments"}</tool_call>, Qwen 2.5 and later, Hermes),
``bare`` (the answer is {"name", "parameters"}, Llama 3) and, for chat formats that know no tools, ``told``: the
system message explains the marked form, and earlier calls and results are written out in it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelmill.core.types import Grammar
from modelmill.text.messages import checked

MARKED, BARE, TOLD = "marked", "bare", "told"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
INTRO = """You may call functions to help with the user's query. Their signatures, in JSON:
<tools>
{tools}
</tools>
For each call write a JSON object with its name and arguments inside these tags:
<tool_call>
{{"name": FUNCTION, "arguments": OBJECT}}
</tool_call>"""


def style_of(templates: str) -> str:
    """How a chat template writes calls."""
    if "tools" not in templates:
        return TOLD
    return MARKED if OPEN in templates else BARE


@dataclass(frozen=True)
class Call:
    """One call. arguments: JSON text. id: made up here."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


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
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        blocks.append(f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}}}\n{CLOSE}')
    return {"role": message["role"], "content": "\n".join(filter(None, [message["content"], *blocks]))}


def forced(tools: Sequence[Mapping[str, Any]], name: str | None) -> Grammar:
    """An answer that is a call and nothing else: of ``name``, or of any tool. It is written bare."""
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    shapes = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return Grammar("json", json.dumps(shapes[0] if len(shapes) == 1 else {"anyOf": shapes}))


class Reader:
    """Takes an answer's text as it comes and tells calls from content. What is no call of a known tool is content."""

    def __init__(self, style: str, names: Sequence[str]) -> None:
        self._bare, self._names = style == BARE, frozenset(names)
        self._held = ""
        self._inside = self._begun = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """(content to give out, calls that are complete)."""
        self._held += text
        return self._push_bare() if self._bare else self._push_marked()

    def flush(self) -> tuple[str, list[Call]]:
        """What was held back until the end."""
        held, self._held = self._held, ""
        if not (self._inside or self._bare):
            return held, []
        calls = self._calls(held)
        if calls:
            return "", calls
        return (OPEN if self._inside else "") + held, []

    def _push_bare(self) -> tuple[str, list[Call]]:
        """Everything is held where the answer begins like an object."""
        if not self._begun and self._held.lstrip()[:1] in ("", "{"):
            return "", []
        self._begun = True
        content, self._held = self._held, ""
        return content, []

    def _push_marked(self) -> tuple[str, list[Call]]:
        content, calls = "", []
        while True:
            mark = CLOSE if self._inside else OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            self._held = after
            if self._inside:
                read = self._calls(before)
                calls += read
                content += "" if read else OPEN + before + CLOSE
            else:
                content += before
            self._inside = not self._inside
        if not self._inside:
            keep = _overlap(self._held, OPEN)
            content += self._held[: len(self._held) - keep]
            self._held = self._held[len(self._held) - keep :]
        # the line breaks around calls are no content
        return (content if content.strip() or not calls else ""), calls

    def _calls(self, text: str) -> list[Call]:
        """The call that a JSON text is; none where it is something else."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return []
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            return [Call(value["name"], arguments)]
        return [Call(value["name"], json.dumps(arguments, ensure_ascii=False))] if isinstance(arguments, dict) else []


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that may begin ``mark``."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
