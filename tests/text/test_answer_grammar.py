"""A constraint covers the whole answer: whatever is sampled, a schema or a forced call is there."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.core.types import Grammar
from modelmill.text.answer_grammar import PromptThinking, whole_answer_grammar
from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, collect_answer
from modelmill.text.chat_format_registry import (
    list_chat_formats,
    load_chat_syntax,
    parser_marks_with_calls,
)
from modelmill.text.grammar import check_grammar
from modelmill.text.tool_grammar import forced_call_grammar, optional_strict_call_grammar
from tests.hypothesis_examples import examples
from tests.text.answer_sampler import AnswerSampler
from tests.text.random_schemas import is_valid, random_parameters

WEATHER = {
    "type": "object",
    "properties": {
        "town": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "exact": {"type": "boolean"},
        "limits": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
        "where": {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]},
        "code": {"type": "string", "pattern": "^[a-c]{2,4}$"},
        "short": {"type": "string", "maxLength": 3},
    },
    "required": ["town", "days"],
}


@cache
def sampler(name: str, control: bool) -> AnswerSampler:
    syntax = load_chat_syntax(name)
    opening = syntax.calls.call[0]
    openers = [opening, "\n" + opening]
    return AnswerSampler(
        [*sorted(parser_marks_with_calls(syntax, syntax.thinking)), *openers], control
    )


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def sampled(
    name: str,
    inner: Grammar,
    state: PromptThinking,
    rng: random.Random,
    control: bool,
    tools: dict[str, Any],
    *,
    forced: bool = True,
) -> ParsedAnswer | None:
    """Sample an answer and parse it; None where it takes too long."""
    syntax = load_chat_syntax(name)
    # a control token is never text; as text these marks could stand in a value
    control = control or name == "gpt_oss"
    grammar = whole_answer_grammar(inner, name, syntax.thinking, state)
    assert grammar is not None
    check_grammar(grammar)
    text = sampler(name, control).sample(grammar, rng)
    if text is None:
        return None
    parser = make_answer_parser(
        syntax,
        tools,
        thinking=syntax.thinking,
        thinks=state == "open",
        forced=forced and bool(tools),
    )
    return collect_answer(
        [*(piece for char in text for piece in parser.push(char)), *parser.flush()]
    )


STATES: tuple[PromptThinking, ...] = ("open", "free", "closed")


def check_forced_calls(name: str, seeds: range) -> int:
    """Check forced calls of random functions; returns how many ended."""
    ended = 0
    for seed in seeds:
        rng = random.Random(f"{name} {seed}")
        tools = {"f": WEATHER, "g": random_parameters(rng)}
        several = rng.random() < 0.3
        state = rng.choice(STATES) if name != "gpt_oss" else "free"
        try:
            inner = forced_call_grammar([tool(n, p) for n, p in tools.items()], None, several)
            answer = sampled(name, inner, state, rng, rng.random() < 0.5, tools)
        except RequestError:
            continue  # a schema that the library or the syntax cannot express
        if answer is None:
            continue
        ended += 1
        assert 1 <= len(answer.calls) <= (16 if several else 1), answer
        for call in answer.calls:
            schema = tools[call.name]
            assert is_valid(json.loads(call.arguments), schema, schema), (seed, call)
        assert not answer.content or name == "qwen_react"
    return ended


@pytest.mark.parametrize("name", list_chat_formats())
def test_a_forced_call_is_valid_in_every_syntax(name: str) -> None:
    assert check_forced_calls(name, range(examples(full=10, quick=6))) >= 1


def check_strict_calls(name: str, seeds: range) -> tuple[int, int]:
    """Check answers that may call a strict function; returns how many ended, and how many call."""
    ended = called = 0
    for seed in seeds:
        rng = random.Random(f"{name} {seed}")
        tools = {"f": WEATHER}
        offered = tool("f", WEATHER)
        offered["function"]["strict"] = True
        as_json = load_chat_syntax(name).calls.writes_arguments_as_json
        inner = optional_strict_call_grammar([offered], rng.random() < 0.5, as_json=as_json)
        assert inner is not None
        state = rng.choice(STATES) if name != "gpt_oss" else "free"
        answer = sampled(name, inner, state, rng, rng.random() < 0.5, tools, forced=False)
        if answer is None:
            continue
        ended += 1
        called += bool(answer.calls)
        for call in answer.calls:
            assert is_valid(json.loads(call.arguments), WEATHER, WEATHER), (seed, call)
    return ended, called


@pytest.mark.parametrize("name", list_chat_formats())
def test_a_strict_function_is_called_as_declared_or_not_at_all(name: str) -> None:
    ended, _ = check_strict_calls(name, range(examples(full=8, quick=5)))
    assert ended > 1


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def check_schema(name: str, seeds: range) -> int:
    """Check answers of a schema with thinking on; returns how many thought."""
    thought = 0
    for seed in seeds:
        rng = random.Random(f"{name} {seed}")
        inner = Grammar("json", json.dumps(SCHEMA))
        state = rng.choice(STATES[:2]) if name != "gpt_oss" else "free"
        answer = sampled(name, inner, state, rng, rng.random() < 0.5, {})
        if answer is None:
            continue
        thought += bool(answer.reasoning)
        assert isinstance(json.loads(answer.content)["x"], int)
    return thought


@pytest.mark.parametrize("name", ["hermes", "gpt_oss", "gemma4"])
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("choice", json.dumps(["yes", "no"])),
        Grammar("lark", 'start: "yes" | "no"'),
        Grammar("lark", "%llguidance {}\n\nstart: WORD\nWORD: /yes|no/"),
        Grammar("regex", "yes|no"),
    ],
    ids=lambda grammar: f"{grammar.grammar_type}-{len(grammar.text)}",
)
def test_every_type_of_grammar_goes_with_thinking(name: str, grammar: Grammar) -> None:
    state: PromptThinking = "free" if name == "gpt_oss" else "open"
    answers = [sampled(name, grammar, state, random.Random(seed), True, {}) for seed in range(6)]
    contents = {answer.content for answer in answers if answer is not None}
    assert contents
    assert contents <= {"yes", "no"}


@pytest.mark.parametrize("name", ["hermes", "gpt_oss", "mistral_v13", "gemma4", "deepseek_v31"])
def test_a_schema_is_not_skipped_by_thinking(name: str) -> None:
    assert check_schema(name, range(25)) > 5
