"""Schemas of tools are read once for an answer, and strange ones end no reader."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.text import tool_schema_cache
from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import (
    ParsedAnswer,
    ParsedToolCall,
    collect_answer,
)
from modelmill.text.answer_renderer import render_answer
from modelmill.text.chat_format_registry import load_chat_syntax
from tests.text.tool_schemas import object_schema

BRANCHES = {"oneOf": [object_schema(**{f"k{each}": "string"}) for each in range(300)]}
NESTED = {
    "properties": {"x": {"$ref": "#/$defs/A"}},
    "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/A"}}},
}


def calls_of(name: str, text: str, schema: Any, size: int = 0) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of an answer that comes in pieces of a size; 0: at once."""
    syntax = load_chat_syntax(name)
    parser = make_answer_parser(syntax, {"f": schema}, thinking=syntax.thinking)
    size = size or len(text)
    pieces = [
        each for at in range(0, len(text), size) for each in parser.push(text[at : at + size])
    ]
    answer = collect_answer([*pieces, *parser.flush(cut=False)])
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "<|tool_call>call:f{k99:[" + "1," * 200 + "1]}<tool_call|>"),
        ("gemma3", "[f(k99=[" + "1," * 200 + "1])]"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n" + "<parameter=k99>\n1\n</parameter>\n" * 200
         + "</function>\n</tool_call>"),
        ("minicpm5", '<function name="f"><param name="k99">1</param></function>' * 200),
    ],
)  # fmt: skip
def test_a_schema_is_not_read_for_each_value(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    for function in ("is_declared_string", "resolve_parameter_type", "declared_arguments",
                     "takes_undeclared_arguments", "has_required_arguments"):  # fmt: skip
        real = getattr(tool_schema_cache, function)

        def counted(*args: Any, _name: str = function, _real: Any = real) -> Any:
            reads.append(_name)
            return _real(*args)

        monkeypatch.setattr(tool_schema_cache, function, counted)
    assert calls_of(name, text, BRANCHES)[1]
    assert len(reads) < 10


def test_names_and_types_are_read_of_the_same_branches() -> None:
    branches = {"oneOf": [object_schema(**{f"k{each}": "integer"}) for each in range(300)]}
    text = "<tool_call>\n<function=f>\n<parameter=k7>\n1\n</parameter>\n</function>\n</tool_call>"
    assert calls_of("qwen3_coder", text, branches) == ("", [("f", '{"k7": 1}')])


def test_values_that_are_nested_deeply_count_as_undeclared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    depths: list[int] = []
    real = tool_schema_cache.is_declared_string
    monkeypatch.setattr(
        tool_schema_cache,
        "is_declared_string",
        lambda *args: depths.append(len(args[2]) + 1) or real(*args),
    )
    calls_of("gemma4", "<|tool_call>call:f{x:" + "[1," * 500, NESTED)
    assert max(depths) == tool_schema_cache.MAX_ARGUMENT_DEPTH
    assert len(depths) <= 2 * tool_schema_cache.MAX_ARGUMENT_DEPTH


@pytest.mark.parametrize("key", ["anyOf", "allOf", "oneOf"])
@pytest.mark.parametrize("name", ["minimax_m3", "gemma4", "qwen3_coder"])
def test_long_chains_of_references_raise_nothing(name: str, key: str) -> None:
    definitions = {f"a{each}": {key: [{"$ref": f"#/$defs/a{each + 1}"}]} for each in range(400)}
    call = ParsedToolCall("a", "f", '{"x": "a"}')
    text = render_answer(load_chat_syntax(name), ParsedAnswer("", (call,)))
    schema = {"$ref": "#/$defs/a0", "$defs": definitions}

    def below(frames: int) -> Any:
        """As where a server calls it: below some hundred frames."""
        return below(frames - 1) if frames else calls_of(name, text, schema)

    assert below(250) == ("", [("f", '{"x": "a"}')])


@pytest.mark.parametrize("declared", [{"a": 1}, [{}], [[1]], 7])
def test_a_type_that_is_none_is_any(declared: Any) -> None:
    text = "<tool_call>\n<function=f>\n<parameter=x>\na\n</parameter>\n</function>\n</tool_call>"
    schema = {"properties": {"x": {"type": declared}}}
    assert calls_of("qwen3_coder", text, schema) == ("", [("f", '{"x": "a"}')])


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # a string ends with its call, whatever follows: a stream does not wait for it
        ("gemma3", '[f(x="a")], [f(x="b")]', (",", ['{"x": "a"}', '{"x": "b"}'])),
        ("gemma3", '[f(x="a")]: done', (": done", ['{"x": "a"}'])),
        # the next argument's mark has a line break of its own
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\na\n\n<parameter=n>\n3\n"
         "</parameter>\n</function>\n</tool_call>", ("", ['{"x": "a\\n", "n": 3}'])),
    ],
)  # fmt: skip
def test_streamed_is_whole(
    name: str, text: str, expected: tuple[str, list[str]], size: int
) -> None:
    content, calls = calls_of(name, text, object_schema(x="string", n="integer"), size)
    assert (content, [arguments for _, arguments in calls]) == expected


def test_many_undeclared_calls_are_content() -> None:
    text = "[" + "q(), " * 3000 + 'f(x="a")]'
    content, calls = calls_of("gemma3", text, object_schema(x="string"))
    assert calls == [("f", '{"x": "a"}')]
    assert content.count("q()") == 3000
