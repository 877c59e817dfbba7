"""Keyword arguments in Python's syntax that JSON does not have, and that models write wrongly."""

from __future__ import annotations

import json

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, collect_answer
from modelmill.text.chat_format_registry import load_chat_syntax

OPEN, CLOSE = "<|tool_call_start|>[", "]<|tool_call_end|>"
# arguments as written, as read
CASES = [
    ("a={'x', 'y'}, b={1,}, c={}", {"a": ["x", "y"], "b": [1], "c": {}}),
    ("a={'k': {'z'}}, b=[{'k': 1}]", {"a": {"k": ["z"]}, "b": [{"k": 1}]}),
    ("a=07, b=-05, c=00, d=0.05, e=01.5", {"a": 7, "b": -5, "c": 0, "d": 0.05, "e": 1.5}),
    ("a='awk '{print $1}' f', b=\"it\"s\"", {"a": "awk '{print $1}' f", "b": 'it"s'}),
    ("a='cut -d',' -f1'", {"a": "cut -d',' -f1"}),
    ("a='p -c \"f('x', g('y'))\"', b=1", {"a": "p -c \"f('x', g('y'))\"", "b": 1}),
    ("a=['it's', 'b'], b={'it's': 'c'}", {"a": ["it's", "b"], "b": {"it's": "c"}}),
    # strings that end where Python ends them
    ("a='x' , b = 'y' ,", {"a": "x", "b": "y"}),
    ("a='(x)]', b={'k' : ['x'] }", {"a": "(x)]", "b": {"k": ["x"]}}),
]


def parse(text: str, size: int, chat_format: str = "lfm2") -> ParsedAnswer:
    parser = make_answer_parser(load_chat_syntax(chat_format), {"f": None})
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return collect_answer([*(p for each in pieces for p in parser.push(each)), *parser.flush()])


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(("written", "arguments"), CASES)
def test_arguments_are_read(written: str, arguments: dict[str, object], size: int) -> None:
    answer = parse(f"{OPEN}f({written}), f(n=1){CLOSE} so", size)
    assert [json.loads(call.arguments) for call in answer.calls] == [arguments, {"n": 1}]
    assert answer.content == "so"


def test_many_open_braces_are_no_recursion() -> None:
    answer = parse(f"{OPEN}f(a={'{' * 20_000}{CLOSE} so", 1000)
    assert [call.arguments for call in answer.calls] == ['{"a": {}}']
    assert answer.content == "so"


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("written", ["a='x' y", "a='x' + 'y'", "a='x' \\"])
def test_the_end_mark_ends_a_string_whose_end_is_not_clear(written: str, size: int) -> None:
    answer = parse(f"{OPEN}f({written}{CLOSE} so", size)
    assert answer.content == "so"
    assert answer.calls[0].arguments.startswith('{"a": "x')
    assert "tool_call_end" not in answer.calls[0].arguments


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_a_mark_that_comes_in_pieces_ends_a_string_as_a_whole_one(size: int) -> None:
    answer = parse('<function_calls>f(a="x"</function_calls>', size, "olmo3")
    assert [json.loads(call.arguments) for call in answer.calls] == [{"a": "x"}]
