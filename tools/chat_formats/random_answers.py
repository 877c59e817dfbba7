"""Random answers for a chat format, and random cuts of their text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall
from modelmill.text.chat_syntax import ChatSyntax, ThinkingSyntax
from modelmill.text.tool_call_reader import split_mark_parts

WORDS = (
    "the", "weather", "in", "Ulm", "is", "fine", "é", "日本", "🎉", "a<b", "x>y", "{", "}", "[1]",
    "</", "<", "|", "\n", "\n\n", "  ", '"quoted"', "'", "\\n", "1.", ":", "call", "name",
    "Thought", "f(", "`code`", "```", "<|", "&amp;",
)  # fmt: skip
KEYS = ("city", "days", "unit", "query", "path", "é", "with_underscore", "x1")
NAMES = ("get_weather", "f", "search-web", "run_code", "now")
TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")


@dataclass(frozen=True)
class RandomCase:
    """One answer, and what its parser is made of.

    Attributes:
        answer: what the model means.
        tools: names of the tools and the schemas of their parameters.
        thinking: marks of the thinking; None if the model does not think.
        thinks: whether the prompt began the thinking.
    """

    answer: ParsedAnswer
    tools: dict[str, dict[str, Any]]
    thinking: ThinkingSyntax | None
    thinks: bool


def random_case(syntax: ChatSyntax, rng: random.Random) -> RandomCase:
    """Return an answer that the format can write."""
    calls = syntax.calls
    names = [name for name in NAMES if calls.style != "pythonic" or name.isidentifier()]
    parameters = _random_declarations if calls.style == "tags" else _random_parameters
    tools = {name: parameters(rng, syntax) for name in rng.sample(names, rng.randint(1, 3))}
    most = min(3, calls.max_calls or 3)
    count = rng.choice([0, 1, 1, rng.randint(0, most)])
    thinking = syntax.thinking if rng.random() < 0.7 else None
    harmony = calls.style == "harmony"
    thinks = thinking is not None and not harmony and rng.random() < 0.5
    reasoning = _random_text(rng, syntax) if thinking is not None and rng.random() < 0.8 else ""
    can_have_content = not calls.bare or bool(calls.content_end.strip()) or not count
    content = _random_text(rng, syntax) if can_have_content and rng.random() < 0.7 else ""
    if count == 0 and not content:
        content = "ok"
    answer = ParsedAnswer(
        content,
        tuple(_random_call(rng, syntax, tools, index) for index in range(count)),
        reasoning,
    )
    return RandomCase(answer, tools, thinking, thinks)


def random_cuts(text: str, rng: random.Random) -> Iterator[str]:
    """Yield the text in random pieces, some of one character."""
    at, most = 0, 1 if rng.random() < 0.05 else rng.choice([4, 8, 20, 60, 200])
    while at < len(text):
        size = 1 + int(rng.random() * most)  # randint would take as long as a parser's step
        yield text[at : at + size]
        at += size


@cache
def forbidden_texts(syntax: ChatSyntax) -> list[str]:
    """Return the marks that texts of an answer must not contain."""
    calls, thinking = syntax.calls, syntax.thinking
    marks = [*calls.section, *calls.call, calls.optional[0], calls.code_mark]
    marks += [*calls.stops, *calls.openers, *calls.closers]
    marks += [calls.string_mark, *syntax.control_tokens, *syntax.content]
    marks += [] if thinking is None else thinking.marks
    if calls.parameter is not None:
        marks += [calls.parameter.open, calls.parameter.close, calls.parameter.key_end]
        marks += [calls.parameter.type_open, *calls.parameter.type_marks]
    if calls.style == "react":
        marks += ["Action", "Final Answer", "Observation", "Thought"]
    parts = {part for mark in marks for part in split_mark_parts(mark)}
    return sorted(part for part in parts if len(part) > 1)


def _random_text(rng: random.Random, syntax: ChatSyntax, most: int = 12) -> str:
    """Words and pieces of marks, without a whole mark and without blanks at the ends."""
    forbidden = forbidden_texts(syntax)
    partial = [mark[: -2 if mark.endswith("[") else -1] for mark in forbidden]
    while True:
        words = [
            rng.choice(partial) if partial and rng.random() < 0.15 else rng.choice(WORDS)
            for _ in range(rng.randint(1, most))
        ]
        text = rng.choice(["", " "]).join(words).strip()
        starts_call = syntax.calls.bare and text.startswith(("{", "["))
        if text and not starts_call and not any(mark in text for mark in forbidden):
            return text


def _random_parameters(rng: random.Random, syntax: ChatSyntax) -> dict[str, Any]:
    keys = [key for key in KEYS if syntax.calls.style != "pythonic" or key.isidentifier()]
    return {
        "type": "object",
        "properties": {
            key: {"type": rng.choice(TYPES)} for key in rng.sample(keys, rng.randint(0, 4))
        },
    }


def _random_declarations(rng: random.Random, syntax: ChatSyntax, depth: int = 3) -> dict[str, Any]:
    """A schema whose values are declared to the last: nested tags have no types of their own."""
    if depth == 3:
        value_type = "object"
    else:
        value_type = rng.choice(TYPES if depth else TYPES[:4])
    if value_type == "array":
        return {"type": "array", "items": _random_declarations(rng, syntax, depth - 1)}
    if value_type == "object":
        members = {
            key: _random_declarations(rng, syntax, depth - 1)
            for key in rng.sample(KEYS, rng.randint(0, 4))
        }
        return {"type": "object", "properties": members}
    return {"type": value_type}


def _random_call(
    rng: random.Random, syntax: ChatSyntax, tools: dict[str, dict[str, Any]], index: int
) -> ParsedToolCall:
    name = rng.choice(list(tools))
    values = {
        key: _random_declared(rng, schema, syntax)
        for key, schema in tools[name]["properties"].items()
        if rng.random() < 0.8
    }
    calls = syntax.calls
    verbatim = calls.style in ("json", "harmony", "react") or (
        calls.style == "named" and not calls.string_mark
    )
    if verbatim and rng.random() < 0.3:
        arguments = json.dumps(
            values, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 2])
        )
    else:
        arguments = json.dumps(values, ensure_ascii=False)
    id = f"abc123XY{index}"
    head = calls.head.format(name=name, index=index, number=index + 1, id=id)
    return ParsedToolCall(head if calls.id_from_head else id, name, arguments)


def _random_declared(rng: random.Random, schema: dict[str, Any], syntax: ChatSyntax) -> Any:
    """A value of a declared type, and of the types declared inside it."""
    if "items" in schema:
        return [
            _random_declared(rng, schema["items"], syntax) for _ in range(rng.choice([0, 1, 3]))
        ]
    if "properties" in schema:
        return {
            key: _random_declared(rng, each, syntax)
            for key, each in schema["properties"].items()
            if rng.random() < 0.8
        }
    return _random_value(rng, schema["type"], syntax)


def _random_value(rng: random.Random, value_type: str, syntax: ChatSyntax, depth: int = 2) -> Any:
    if value_type == "string":
        return _random_text(rng, syntax, 8) if rng.random() < 0.9 else ""
    if value_type == "array":
        return [_random_item(rng, syntax, depth) for _ in range(rng.randint(0, 3))]
    if value_type == "object":
        return {
            key: _random_item(rng, syntax, depth) for key in rng.sample(KEYS, rng.randint(0, 3))
        }
    return {
        "integer": rng.randint(-(10**6), 10**6),
        "number": rng.choice([0.5, -2.25, 1e21, 3.0, rng.random()]),
        "boolean": rng.random() < 0.5,
        "null": None,
    }[value_type]


def _random_item(rng: random.Random, syntax: ChatSyntax, depth: int) -> Any:
    types = TYPES if depth else ("string", "integer", "boolean", "null")
    return _random_value(rng, rng.choice(types), syntax, depth - 1)
