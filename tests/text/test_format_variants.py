"""A variable of the template may change how answers are written (K2 Horizon)."""

from __future__ import annotations

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import collect_answer
from modelmill.text.chat_format_registry import (
    detect_chat_format,
    detect_thinking_marks,
    list_chat_formats,
    load_chat_syntax,
    parser_marks_with_calls,
    select_format_variant,
)
from tests.text.tool_schemas import object_schema

BASE = load_chat_syntax("k2_horizon")
TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "town": {"type": "string"},
            "days": {"type": "integer"},
            "hot": {"type": "boolean"},
            "zip": {"type": ["string", "integer"]},
            "street": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "note": {},
        },
    },
    "g": object_schema(),
}
XML = (
    "<ifm|tool_call>f\n<ifm|arg_key>town</ifm|arg_key>\n<ifm|arg_value>Ulm</ifm|arg_value>\n"
    "</ifm|tool_call>"
)
TYPED = (
    "<ifm|tool_call>f\n<ifm|arg_key>town</ifm|arg_key>\n<ifm|arg_type>string</ifm|arg_type>\n"
    "<ifm|arg_value>Ulm</ifm|arg_value>\n</ifm|tool_call>"
)
JSON = '<ifm|tool_call>{"name": "f", "arguments": {"town": "Ulm"}}</ifm|tool_call>'


def _section(call: str) -> str:
    return f"<ifm|tool_calls>\n{call}\n</ifm|tool_calls>"


def _calls(name: str, text: str) -> list[tuple[str, str]]:
    parser = make_answer_parser(load_chat_syntax(name), TOOLS)
    pieces = [each for char in text for each in parser.push(char)]
    answer = collect_answer([*pieces, *parser.flush()])
    whole = make_answer_parser(load_chat_syntax(name), TOOLS)
    again = collect_answer([*whole.push(text), *whole.flush()])
    assert [call.arguments for call in again.calls] == [call.arguments for call in answer.calls]
    return [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(
    ("options", "name", "closing"),
    [
        ({}, "k2_horizon", "</ifm|think>"),
        ({"tool_call_format": "xml"}, "k2_horizon_xml", "</ifm|think>"),
        ({"tool_call_format": "json"}, "k2_horizon_json", "</ifm|think>"),
        ({"tool_call_format": "xml_typed"}, "k2_horizon_typed", "</ifm|think>"),
        ({"reasoning_effort": "medium"}, "k2_horizon", "</ifm|think_fast>"),
        (
            {"reasoning_effort": "low", "tool_call_format": "json"},
            "k2_horizon_json",
            "</ifm|think_faster>",
        ),
        ({"tool_call_format": ["json"]}, "k2_horizon", "</ifm|think>"),
    ],
)
def test_variables_select_a_variant(options: dict[str, object], name: str, closing: str) -> None:
    selected, thinking = select_format_variant("k2_horizon", BASE.thinking, options)
    assert selected == name
    assert thinking is not None
    assert thinking.marks[1] == closing
    assert select_format_variant("k2_horizon", None, options) == (name, None)


def test_every_variant_is_a_format() -> None:
    names = [
        each.format_name for name in list_chat_formats() for each in load_chat_syntax(name).variants
    ]
    assert {f"k2_horizon_{each}" for each in ("json", "typed", "xml")} == set(filter(None, names))
    for name in filter(None, names):
        assert set(load_chat_syntax(name).calls.section) == set(BASE.calls.section)


def test_marks_of_a_variant_are_visible() -> None:
    name, thinking = select_format_variant(
        "k2_horizon", BASE.thinking, {"tool_call_format": "xml_typed", "reasoning_effort": "low"}
    )
    marks = set(parser_marks_with_calls(load_chat_syntax(name), thinking))
    assert {"<ifm|arg_type>", "</ifm|arg_type>", "</ifm|arg_key>", "</ifm|arg_value>"} <= marks
    assert thinking is not None
    assert set(thinking.marks) <= marks


def test_the_template_shows_the_format() -> None:
    template = "{% if tools %}<ifm|tool_calls>{% endif %}<ifm|think></ifm|think>"
    assert detect_chat_format(template) == "k2_horizon"
    assert detect_thinking_marks(BASE, template) == BASE.thinking


@pytest.mark.parametrize(
    ("name", "written"),
    [("k2_horizon_xml", XML), ("k2_horizon_typed", TYPED), ("k2_horizon_json", JSON)],
)
def test_calls_of_other_variants_are_none(name: str, written: str) -> None:
    for call in (XML, TYPED, JSON):
        expected = [("f", '{"town": "Ulm"}')] if call == written else []
        assert _calls(name, _section(call)) == expected


@pytest.mark.parametrize("call", [XML, TYPED, JSON])
def test_without_the_variable_every_form_is_read(call: str) -> None:
    assert _calls("k2_horizon", _section(call)) == [("f", '{"town": "Ulm"}')]
    assert _calls("k2_horizon", _section(f"{call}\n{call}")) == [("f", '{"town": "Ulm"}')] * 2
    assert _calls("k2_horizon", call) == [("f", '{"town": "Ulm"}')]


def test_a_mark_of_a_type_without_its_end_is_no_call() -> None:
    assert _calls("k2_horizon", _section(TYPED.replace("</ifm|arg_type>", ""))) == []
    assert _calls("k2_horizon", TYPED[: TYPED.index("string")]) == []


def test_json_arguments_get_the_declared_types() -> None:
    arguments = '{"town": 5, "days": "2", "hot": "true", "other": "7"}'
    text = f'<ifm|tool_call>{{"name": "f", "arguments": {arguments}}}</ifm|tool_call>'
    expected = '{"town": "5", "days": 2, "hot": true, "other": "7"}'
    assert _calls("k2_horizon_json", _section(text)) == [("f", expected)]


def test_a_written_string_stays_one_where_the_tool_takes_strings() -> None:
    arguments = '{"zip": "01234", "street": "null", "note": "true"}'
    text = f'<ifm|tool_call>{{"name": "f", "arguments": {arguments}}}</ifm|tool_call>'
    for name in ("k2_horizon_json", "k2_horizon"):
        assert _calls(name, _section(text)) == [("f", arguments)]
    numbers = '{"zip": "1234"}'
    text = f'<ifm|tool_call>{{"name": "f", "arguments": {numbers}}}</ifm|tool_call>'
    assert _calls("k2_horizon_json", _section(text)) == [("f", numbers)]


def test_a_written_type_counts_where_none_is_declared() -> None:
    def call(written_type: str) -> str:
        return _section(
            TYPED.replace("town", "x").replace(">string<", f">{written_type}<")
        ).replace("Ulm", "7")

    assert _calls("k2_horizon_typed", call("integer")) == [("f", '{"x": 7}')]
    assert _calls("k2_horizon_typed", call("string")) == [("f", '{"x": "7"}')]
    assert _calls("k2_horizon_typed", call("any")) == [("f", '{"x": "7"}')]
    for name in ("k2_horizon_typed", "k2_horizon"):
        assert _calls(name, call(" string\n")) == [("f", '{"x": "7"}')]
