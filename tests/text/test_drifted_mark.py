"""Qwen3-Coder: closing marks of arguments that a model writes with other letters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, collect_answer
from modelmill.text.chat_format_registry import load_chat_syntax
from tests.text.tool_schemas import object_schema

TOOLS = {"mill": object_schema(grain="string", kg="integer", how="object")}
END = "\n</function>\n</tool_call>"
DRIFTED = [
    "\n</parameter1>",
    "\n</parameter_mill>",
    "\n</parameter",
    "</parameter2>",
    "\n</parameter_",
]
TEXTS = [
    "<b>\n</parameters>",  # a tag of XML
    "a\n</parameter1>\nb",
    "</parameter1>\n<param",
    "</parameterised>",
    "two\n\n",
    "\n</function>\n</parameter1>\n</function>",
]


def _call(grain: str, kg: str) -> str:
    return f"<tool_call>\n<function=mill>\n<parameter=grain>\n{grain}\n<parameter=kg>\n{kg}{END}"


def _read(text: str, size: int, cut: bool = False) -> ParsedAnswer:
    parser = make_answer_parser(load_chat_syntax("qwen3_coder"), TOOLS)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parsed = [each for piece in pieces for each in parser.push(piece)]
    return collect_answer([*parsed, *parser.flush(cut=cut)])


def _check(text: str, values: dict[str, Any]) -> None:
    whole = _read(text, len(text))
    assert (json.loads(whole.calls[0].arguments), whole.content) == (values, "")
    for size in (1, 2, 7):
        (call,) = _read(text, size).calls
        assert call.arguments == whole.calls[0].arguments
    for end in range(len(text)):
        calls = _read(text[:end], 3, cut=True).calls
        assert all(whole.calls[0].arguments.startswith(call.arguments) for call in calls)


@pytest.mark.parametrize("drifted", DRIFTED)
def test_a_value_ends_at_a_closing_mark_with_other_letters(drifted: str) -> None:
    _check(_call(f"rye{drifted}", "3\n</parameter>"), {"grain": "rye", "kg": 3})
    _check(_call("rye\n</parameter>", f"3{drifted}"), {"grain": "rye", "kg": 3})
    _check(f"<function=mill>\n<parameter=grain>\nrye{drifted}{END}", {"grain": "rye"})
    how = '{"a": "</parameter1>"}'
    _check(f"<function=mill>\n<parameter=how>\n{how}{drifted}{END}", {"how": json.loads(how)})


@pytest.mark.parametrize("text", TEXTS)
def test_such_a_text_inside_of_a_value_stays(text: str) -> None:
    _check(_call(f"{text}\n</parameter>", "3\n</parameter>"), {"grain": text, "kg": 3})


def test_a_tag_of_many_letters_stays() -> None:
    text = f"rye\n</parameter_{'x' * 50}>"
    _check(_call(text, "3\n</parameter>"), {"grain": text, "kg": 3})
