"""Arguments that a tool declares by references and alternatives at the root of its parameters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import ParsedAnswer, ParsedToolCall, collect_answer
from modelmill.text.answer_renderer import render_answer
from modelmill.text.chat_format_registry import load_chat_syntax
from modelmill.text.declared_arguments import (
    can_call_with_argument_names,
    declared_arguments,
    has_required_arguments,
    takes_undeclared_arguments,
)
from modelmill.text.parameter_types import schema_types

TEXT, COUNT = {"type": "string"}, {"type": "integer"}
NOTE = {"type": "object", "properties": {"note": TEXT, "rows": COUNT}, "required": ["note"]}
AREA = {
    "type": "object",
    "properties": {"area": {"type": "object", "properties": {"km": {"type": "number"}}}},
    "required": ["area"],
}
DEFINED = {"$defs": {"note": NOTE, "area": AREA}}
BY_NOTE, BY_AREA = {"$ref": "#/$defs/note"}, {"$ref": "#/$defs/area"}
ROOTS: dict[str, dict[str, Any]] = {
    "reference": {**DEFINED, **BY_NOTE},
    "one of": {**DEFINED, "oneOf": [BY_AREA, BY_NOTE]},
    "any of": {"anyOf": [AREA, NOTE]},
    "all of": {**DEFINED, "allOf": [BY_NOTE, {"required": ["rows"]}]},
    "properties beside": {"properties": {"rows": COUNT}, "oneOf": [NOTE, AREA]},
    "reference to references": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": NOTE},
        "$ref": "#/$defs/a",
    },
}
UNTYPED = ("qwen3_coder", "glm45", "glm47", "minimax_m2", "minimax_m3", "dots", "step3", "minicpm5")
ENDLESS = {"anyOf": [{"$ref": "#"}, {"$ref": "#"}, {"$ref": "#"}], "properties": {"note": TEXT}}


def _read(name: str, text: str, parameters: dict[str, Any]) -> list[ParsedToolCall]:
    results = []
    for pieces in ([text], list(text)):
        parser = make_answer_parser(load_chat_syntax(name), {"f": parameters})
        parsed = [each for piece in pieces for each in parser.push(piece)]
        results.append(collect_answer([*parsed, *parser.flush()]).calls)
    assert [call.arguments for call in results[0]] == [call.arguments for call in results[1]]
    return list(results[0])


def _write(name: str, arguments: dict[str, Any]) -> str:
    call = ParsedToolCall("functions.f:0", "f", json.dumps(arguments))
    return render_answer(load_chat_syntax(name), ParsedAnswer("", (call,)))


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("name", UNTYPED)
@pytest.mark.parametrize("note", ["null", "0123", '{"a": 1}', "plain"])
def test_types_come_from_all_parts_of_the_root(name: str, root: str, note: str) -> None:
    arguments = {"note": note, "rows": 7}
    (call,) = _read(name, _write(name, arguments), ROOTS[root])
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("root", ["one of", "any of", "properties beside"])
@pytest.mark.parametrize("name", UNTYPED)
def test_an_object_that_one_alternative_declares_is_one(name: str, root: str) -> None:
    arguments = {"area": {"km": 2.5}}
    (call,) = _read(name, _write(name, arguments), ROOTS[root])
    assert json.loads(call.arguments) == arguments


def test_alternatives_with_other_types_take_either() -> None:
    either = {"oneOf": [{"properties": {"to": TEXT}}, {"properties": {"to": COUNT}}]}
    for value in (7, "home"):
        (call,) = _read("qwen3_coder", _write("qwen3_coder", {"to": value}), either)
        assert json.loads(call.arguments) == {"to": value}


@pytest.mark.parametrize("root", ROOTS)
def test_words_without_quotes_are_declared_strings(root: str) -> None:
    (call,) = _read("lfm2", "<|tool_call_start|>[f(note=01, rows=2)]<|tool_call_end|>", ROOTS[root])
    assert json.loads(call.arguments) == {"note": "01", "rows": 2}


@pytest.mark.parametrize("root", ["reference", "one of", "any of", "reference to references"])
def test_a_number_alone_calls_the_tool_that_takes_the_arguments(root: str) -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>0<|tool_call_argument_begin|>"
        '{"note": "x", "rows": 1}<|tool_call_end|><|tool_calls_section_end|>'
    )
    (call,) = _read("kimi_k2", text, ROOTS[root])
    assert (call.name, json.loads(call.arguments)) == ("f", {"note": "x", "rows": 1})


@pytest.mark.parametrize(
    ("root", "keys", "complete", "callable_"),
    [
        ("one of", {"note"}, True, True),
        ("one of", {"area"}, True, True),
        ("one of", {"rows"}, False, False),
        ("one of", {"note", "other"}, True, False),
        ("all of", {"note"}, False, False),
        ("all of", {"note", "rows"}, True, True),
        ("reference", set(), False, False),
        ("properties beside", {"area", "rows"}, True, True),
    ],
)
def test_names_of_arguments(root: str, keys: set[str], complete: bool, callable_: bool) -> None:
    assert has_required_arguments(ROOTS[root], keys) is complete
    assert can_call_with_argument_names(ROOTS[root], keys) is callable_


def test_declared_names_are_those_of_all_parts() -> None:
    assert declared_arguments(ROOTS["one of"]) == {"note", "rows", "area"}
    assert declared_arguments({"$ref": "#/nowhere"}) is None
    assert declared_arguments({"properties": {}}) == set()
    assert not takes_undeclared_arguments(ROOTS["one of"])
    assert takes_undeclared_arguments({"allOf": [{"additionalProperties": {}}]})


def test_minicpm5_keeps_arguments_that_an_alternative_declares() -> None:
    (call,) = _read("minicpm5", _write("minicpm5", {"note": "x", "else": 1}), ROOTS["one of"])
    assert json.loads(call.arguments) == {"note": "x"}


@pytest.mark.parametrize("name", UNTYPED)
def test_a_schema_that_refers_to_itself_ends(name: str) -> None:
    (call,) = _read(name, _write(name, {"note": "12"}), ENDLESS)
    assert json.loads(call.arguments) == {"note": "12"}
    assert schema_types({"anyOf": [{"$ref": "#/anyOf/0"}] * 3}, ENDLESS) == schema_types({}, {})
    assert can_call_with_argument_names(ENDLESS, {"note"})
