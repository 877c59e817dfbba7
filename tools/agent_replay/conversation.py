"""A seeded session of a coding agent: parallel tool calls with long results, in two dialects."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WORDS = (
    "the", "file", "returns", "a", "list", "of", "tests", "which", "fail", "when", "parser",
    "reads", "empty", "lines", "so", "we", "change", "how", "buffer", "grows", "and", "check",
)  # fmt: skip
TOOLS: Mapping[str, tuple[str, ...]] = {
    "read_file": ("path",),
    "run_tests": ("folder", "pattern"),
    "search": ("text", "folder"),
}
SYSTEM = "You are a careful engineer. Use the tools, then answer in one sentence."
RESULT_SHARE = 0.85
"""Of a turn's characters: tool results; the rest is what the model said and was asked."""


@dataclass(frozen=True)
class AgentCall:
    """A tool call with its result."""

    id: str
    name: str
    arguments: Mapping[str, str]
    result: str


@dataclass(frozen=True)
class AgentTurn:
    """What the user asks, what the agent says, and the calls that it makes at once."""

    question: str
    text: str
    calls: Sequence[AgentCall]


def make_session(turns: int, characters: int, seed: int) -> list[AgentTurn]:
    """Make a session.

    Args:
        turns: number of turns.
        characters: of all turns together, about.
        seed: of everything in it.
    """
    rng = random.Random(seed)
    per_turn = characters // turns
    session = []
    for number in range(turns):
        names = rng.sample(sorted(TOOLS), k=2 + number % 2)
        length = int(per_turn * RESULT_SHARE) // len(names)
        calls = [
            AgentCall(
                f"call{number:03d}{place}x",
                name,
                {key: _text(rng, 24) for key in TOOLS[name]},
                _text(rng, length),
            )
            for place, name in enumerate(names)
        ]
        spoken = (per_turn - length * len(names)) // 3
        session.append(AgentTurn(_text(rng, spoken), _text(rng, spoken), calls))
    return session


def _text(rng: random.Random, length: int) -> str:
    parts: list[str] = []
    while sum(map(len, parts)) + len(parts) < length:
        parts.append(rng.choice(WORDS))
    return " ".join(parts)


def openai_request(session: Sequence[AgentTurn], turn: int) -> dict[str, Any]:
    """The chat completion of a turn: everything before it, and its question."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for each in session[:turn]:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in each.calls
        ]
        messages.append({"role": "user", "content": each.question})
        messages.append({"role": "assistant", "content": each.text, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": call.result} for call in each.calls
        ]
    messages.append({"role": "user", "content": session[turn].question})
    tools = [
        {"type": "function", "function": {"name": name, "parameters": _schema(keys)}}
        for name, keys in TOOLS.items()
    ]
    return {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 8}


def anthropic_request(session: Sequence[AgentTurn], turn: int) -> dict[str, Any]:
    """The message of a turn: a new billing header, and the cache mark on the newest block."""
    mark = {"cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for each in session[:turn]:
        messages.append({"role": "user", "content": [*results, _text_block(each.question)]})
        calls = [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
            for call in each.calls
        ]
        messages.append({"role": "assistant", "content": [_text_block(each.text), *calls]})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": call.result}
            for call in each.calls
        ]
    newest = {**_text_block(session[turn].question), **mark}
    messages.append({"role": "user", "content": [*results, newest]})
    header = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={turn * 7919:05x};"
    return {
        "system": [_text_block(header), {**_text_block(SYSTEM), **mark}],
        "messages": messages,
        "tools": [{"name": name, "input_schema": _schema(keys)} for name, keys in TOOLS.items()],
        "temperature": 0,
        "max_tokens": 8,
    }


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _schema(keys: Sequence[str]) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in keys}
    return {"type": "object", "properties": properties, "required": list(keys)}
