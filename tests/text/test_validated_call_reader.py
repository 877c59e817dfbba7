"""A checked call is reported when its tool takes it; a number alone finds the one tool."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, collect_answer
from modelmill.text.chat_format_registry import load_chat_syntax

CITY = {
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}},
    "required": ["city"],
}
OPEN = {**CITY, "additionalProperties": True}
TOOLS: dict[str, dict[str, Any]] = {
    "f": CITY,
    "open": OPEN,
    "g": {"properties": {"path": {"type": "string"}}},
    "h": {"properties": {"path": {"type": "string"}, "mode": {}}, "required": ["mode"]},
}
SIZES = (1, 3, 1000)


def parse(name: str, text: str, size: int, cut: bool = False) -> ParsedAnswer:
    parser = make_answer_parser(load_chat_syntax(name), TOOLS)
    texts = [text[at : at + size] for at in range(0, len(text), size)]
    return collect_answer([*(p for each in texts for p in parser.push(each)), *parser.flush(cut)])


def call(inside: str, name: str = "f") -> str:
    return f'<function name="{name}">{inside}</function>'


ULM = '<param name="city">Ulm</param>'
DAYS = '<param name="n">2</param>'


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("inside", "name", "arguments"),
    [
        (ULM + DAYS, "f", '{"city": "Ulm", "n": 2}'),
        (ULM + '<param name="more">x</param>', "f", '{"city": "Ulm"}'),
        (ULM + '<param name="more">x</param>', "open", '{"city": "Ulm", "more": "x"}'),
        ("", "g", "{}"),
        # the letter of a byte-level vocabulary inside marks
        (ULM.replace(" ", "\u0120"), "f", '{"city": "Ulm"}'),
    ],
)
def test_a_call_that_its_tool_takes(inside: str, name: str, arguments: str, size: int) -> None:
    answer = parse("minicpm5", f"So: {call(inside, name)} done", size)
    assert [(each.name, each.arguments) for each in answer.calls] == [(name, arguments)]
    assert answer.content == "So:  done"


@pytest.mark.parametrize(
    "value",
    [
        '{"a": "\\ud83d\\ude00"}',
        '{"a": 1e308}',
        '{"a": 0.10000000000000000555}',
        '{"a":' * 5000 + "1" + "}" * 5000,
    ],
)
def test_a_value_stays_as_it_is_written(value: str) -> None:
    inside = f'{ULM}<param name="o">{value}</param>'
    more = '<param name="more">x</param>'
    for text in (inside, inside + more):
        (answer,) = parse("minicpm5", call(text), 1000).calls
        assert answer.arguments == f'{{"city": "Ulm", "o": {value}}}'


def test_an_empty_schema_of_further_arguments_allows_them() -> None:
    tools: dict[str, dict[str, Any]] = {"f": {"properties": {}, "additionalProperties": {}}}
    parser = make_answer_parser(load_chat_syntax("minicpm5"), tools)
    answer = collect_answer([*parser.push(call(ULM)), *parser.flush()])
    assert [each.arguments for each in answer.calls] == ['{"city": "Ulm"}']


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "text",
    [
        call(DAYS),  # without what the tool requires
        call(ULM + ULM),
        call("<param>Ulm</param>" + ULM),
        call(ULM).removesuffix("</function>"),
    ],
)
def test_another_one_is_text(text: str, size: int) -> None:
    answer = parse("minicpm5", text, size)
    assert not answer.calls
    assert answer.content == text


@pytest.mark.parametrize("size", SIZES)
def test_a_call_behind_a_refused_one_is_read(size: int) -> None:
    answer = parse("minicpm5", call(DAYS) + call(ULM), size)
    assert [each.arguments for each in answer.calls] == ['{"city": "Ulm"}']
    assert answer.content == call(DAYS)


@pytest.mark.parametrize("size", SIZES)
def test_a_call_that_a_limit_cut_off_is_dropped(size: int) -> None:
    answer = parse("minicpm5", "So:" + call(ULM)[:-3], size, cut=True)
    assert answer == ParsedAnswer("So:")


KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>3<|tool_call_argument_begin|>"
    "{}<|tool_call_end|><|tool_calls_section_end|>"
)


@pytest.mark.parametrize("size", SIZES)
def test_a_number_alone_calls_the_one_tool_that_takes_the_arguments(size: int) -> None:
    answer = parse("kimi_k2", KIMI.format('{"path": "/a"}'), size)
    assert [(each.name, each.arguments) for each in answer.calls] == [("g", '{"path": "/a"}')]
    assert not answer.content


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arguments", ['{"city": "Ulm"}', '{"other": 1}', '{"path": "/a'])
def test_a_number_is_no_call_of_two_tools_or_none(arguments: str, size: int) -> None:
    """Two tools take a city, none takes another argument, and a call must be complete."""
    answer = parse("kimi_k2", KIMI.format(arguments), size)
    assert not answer.calls


CUT = [
    ("gemma4", '<|tool_call>call:f{city:<|"|>Ul', '{"city": "Ul"}', '{"city": "Ul'),
    ("gemma4", '<|tool_call>call:f{city:<|"|>Ulm<|"|>,n:', '{"city": "Ulm"}',
     '{"city": "Ulm", "n": '),
    ("glm47", "<tool_call>f<arg_key>city</arg_key><arg_value>Ul", '{"city": "Ul"}', '{"city": "Ul'),
    ("glm47", "<tool_call>f<arg_key>city</arg_key><arg_value>Ulm</arg_value><arg_k",
     '{"city": "Ulm"}', '{"city": "Ulm"'),
    ("llama_pythonic", "[f(city='Ul", '{"city": "Ul"}', '{"city": "Ul'),
    # the quote may be one inside the string, until a keyword follows
    ("llama_pythonic", "[f(city='Ul', ", '{"city": "Ul"}', '{"city": "Ul'),
    ("llama_pythonic", "[f(city='Ul', n=3", '{"city": "Ul", "n": 3}', '{"city": "Ul", "n": '),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "Ul', '{"city": "Ul"}',
     '{"city": "Ul'),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "text", "ended", "cut"), CUT)
def test_arguments_are_completed_where_the_model_ends(
    name: str, text: str, ended: str, cut: str, size: int
) -> None:
    assert [each.arguments for each in parse(name, text, size).calls] == [ended]
    assert [each.arguments for each in parse(name, text, size, cut=True).calls] == [cut]
