"""Schemas made weaker: what is changed, what is said, and that the result can be used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.core.types import Grammar
from modelmill.serve.schema_relaxation import (
    MAX_LISTED_REASONS,
    SchemaRelaxer,
    relax_grammar,
    relax_grammar_if_needed,
)
from modelmill.text.grammar import check_grammar

INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
CASES: list[tuple[Any, Any, list[str]]] = [
    (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        ["uniqueItems is not enforced"],
    ),
    (
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 1},
        {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 1},
        ["uniqueItems is not enforced"],
    ),
    (
        {"type": "array", "items": INTEGER, "uniqueItems": False},
        {"type": "array", "items": INTEGER},
        [],
    ),
    (
        {"type": "array", "items": INTEGER, "contains": {"const": 1}, "minContains": 1},
        {"type": "array", "items": INTEGER},
        ["contains is not enforced", "minContains is not enforced"],
    ),
    (
        {"oneOf": [INTEGER, NUMBER]},
        {"anyOf": [INTEGER, NUMBER]},
        ["oneOf is enforced as anyOf: an answer may fit several alternatives"],
    ),
    (
        {"anyOf": [NUMBER], "oneOf": [INTEGER, NUMBER]},
        {"anyOf": [NUMBER], "allOf": [{"anyOf": [INTEGER, NUMBER]}]},
        ["oneOf is enforced as anyOf: an answer may fit several alternatives"],
    ),
    # as pydantic writes Path and Decimal, and dict with keys of Literal, an enum, a pattern, UUID
    (
        {"type": "string", "format": "path"},
        {"type": "string"},
        ["format 'path' is not enforced"],
    ),
    (
        {"anyOf": [NUMBER, {"type": "string", "pattern": r"^(?!^[-+.]*$)\d*$"}, {"pattern": "a+"}]},
        {"anyOf": [NUMBER, {"type": "string"}, {"pattern": "a+"}]},
        [r"#/anyOf/1: pattern '^(?!^[-+.]*$)\\d*$' is not enforced: it looks around or back"],
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
        {
            "type": "object",
            "properties": {"a": INTEGER, "b": INTEGER},
            "additionalProperties": False,
        },
        [],
    ),
    (
        {"$defs": {"C": {"enum": ["a"]}}, "type": "object", "propertyNames": {"$ref": "#/$defs/C"}},
        {
            "$defs": {"C": {"enum": ["a"]}},
            "type": "object",
            "properties": {"a": {}},
            "additionalProperties": False,
        },
        [],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": INTEGER},
        {"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": False},
        [],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^x", "maxLength": 3}},
        {"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": False},
        ["maxLength of propertyNames is not enforced"],
    ),
    (
        {"type": "object", "propertyNames": {"type": "integer"}},
        {"type": "object"},
        ["propertyNames is not enforced"],
    ),
    (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
        {"type": "object", "additionalProperties": INTEGER},
        [],
    ),
    (
        {"type": "object", "propertyNames": False},
        {"type": "object"},
        ["propertyNames is not enforced"],
    ),
    (
        {"type": "object", "propertyNames": {"format": "uuid"}, "additionalProperties": INTEGER},
        {"type": "object", "additionalProperties": INTEGER},
        ["propertyNames is not enforced"],
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a"]}, "properties": {"b": INTEGER}},
        {"type": "object", "properties": {"b": INTEGER}},
        ["propertyNames is not enforced"],
    ),
    (
        {"type": "object", "propertyNames": {"$ref": "#/x"}, "uniqueItems": True},
        {"type": "object"},
        ["uniqueItems is not enforced", "propertyNames is not enforced"],
    ),
    (
        {
            "type": "object",
            "properties": {"n": {"type": "integer", "format": "int64"}},
            "propertyNames": {},
        },
        {"type": "object", "properties": {"n": {"type": "integer", "format": "int64"}}},
        [],
    ),
    (
        {"type": "object", "properties": {"uniqueItems": INTEGER, "oneOf": {"enum": ["oneOf"]}}},
        {"type": "object", "properties": {"uniqueItems": INTEGER, "oneOf": {"enum": ["oneOf"]}}},
        [],
    ),
]


@pytest.mark.parametrize(("schema", "weaker", "reasons"), CASES, ids=range(len(CASES)))
def test_a_schema_becomes_one_that_can_be_used(
    schema: Any, weaker: Any, reasons: list[str]
) -> None:
    relaxer = SchemaRelaxer(schema)
    assert (relaxer.relax_root(), relaxer.relaxation_reasons()) == (weaker, reasons)
    grammar, _, _ = relax_grammar(Grammar("json", json.dumps(schema)))
    check_grammar(grammar)


def test_alternatives_that_a_discriminator_tells_apart_need_no_change() -> None:
    """As pydantic writes a discriminated union."""
    definitions = {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name, "type": "string"}, "size": INTEGER},
            "required": ["kind", "size"],
        }
        for name in ("circle", "square")
    }
    mapping = {name: f"#/$defs/{name}" for name in definitions}
    schema = {
        "$defs": definitions,
        "oneOf": [{"$ref": reference} for reference in mapping.values()],
        "discriminator": {"propertyName": "kind", "mapping": mapping},
    }
    check_grammar(Grammar("json", json.dumps(schema)))


def test_functions_are_named() -> None:
    schema = {"type": "object", "properties": {"a": CASES[0][0]}}
    calls = {"functions": [{"name": "f", "arguments": schema}], "most": None}
    grammar, reasons, _ = relax_grammar(Grammar("calls", json.dumps(calls)))
    assert reasons == ["f: #/properties/a: uniqueItems is not enforced"]
    assert "uniqueItems" not in grammar.text


@pytest.mark.parametrize("text", ["{", "[" * 5000, '{"type": "object"}'])
def test_what_needs_no_change_or_is_no_schema_stays(text: str) -> None:
    grammar = Grammar("json", text)
    assert relax_grammar(grammar) == (grammar, [], [])


def test_other_keywords_are_still_refused() -> None:
    schema = {"type": "object", "not": {"required": ["a"]}, "uniqueItems": True}
    grammar, _, _ = relax_grammar(Grammar("json", json.dumps(schema)))
    with pytest.raises(RequestError):
        check_grammar(grammar)


DEFINITIONS = {
    name: {
        "type": "object",
        "properties": {"kind": {"const": name, "type": "string"}, "size": INTEGER},
        "required": ["kind", "size"],
        "additionalProperties": False,
    }
    for name in ("circle", "square")
}
DISJOINT = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in DEFINITIONS]}
OVERLAPPING = {"oneOf": [INTEGER, NUMBER]}
CLOSED = [
    {
        "type": "object",
        "properties": {name: INTEGER},
        "required": [name],
        "additionalProperties": False,
    }
    for name in ("width", "height")
]
SIDE = {"oneOf": CLOSED}
UNIQUE = {"type": "array", "items": INTEGER, "uniqueItems": True}
ANY_OF = "oneOf is enforced as anyOf: an answer may fit several alternatives"


@pytest.mark.parametrize(
    ("properties", "reasons"),
    [
        ({"shape": DISJOINT, "tags": UNIQUE}, ["#/properties/tags: uniqueItems is not enforced"]),
        ({"shape": DISJOINT, "other": OVERLAPPING}, [f"#/properties/other: {ANY_OF}"]),
        (
            {"a": OVERLAPPING, "b": DISJOINT, "c": UNIQUE, "d": UNIQUE, "e": OVERLAPPING},
            [
                f"#/properties/a: {ANY_OF}",
                "#/properties/c: uniqueItems is not enforced",
                "#/properties/d: uniqueItems is not enforced",
                f"#/properties/e: {ANY_OF}",
            ],
        ),
        ({"shape": DISJOINT}, []),
        (
            {"side": SIDE, "tags": UNIQUE},
            ["#/properties/tags: uniqueItems is not enforced"],
        ),
        (
            {"side": SIDE, "a": OVERLAPPING, "shape": DISJOINT},
            [f"#/properties/a: {ANY_OF}"],
        ),
        ({"a/b~": UNIQUE}, ["#/properties/a~1b~0: uniqueItems is not enforced"]),
    ],
)
@pytest.mark.parametrize("grammar_type", ["json", "calls"])
def test_only_what_cannot_be_used_is_made_weaker(
    properties: dict[str, Any], reasons: list[str], grammar_type: str
) -> None:
    schema = {
        "$defs": DEFINITIONS, "type": "object", "properties": properties,
        "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    calls = {"functions": [{"name": "f", "arguments": schema}], "most": None}
    value = schema if grammar_type == "json" else calls
    grammar, warnings = relax_grammar_if_needed(Grammar(grammar_type, json.dumps(value)), "x")
    prefix = "x: " if grammar_type == "json" else "x: f: "
    assert warnings == [f"{prefix}{reason}" for reason in reasons]
    check_grammar(grammar)
    relaxed = json.loads(grammar.text)
    if grammar_type == "calls":
        relaxed = relaxed["functions"][0]["arguments"]
    side = relaxed["properties"].get("side", {})
    assert ("oneOf" in side) == ("side" in properties), "the library tells these apart"


@pytest.mark.parametrize(
    ("one", "other", "disjoint"),
    [
        (INTEGER, {"type": "string"}, True),
        (INTEGER, NUMBER, False),
        (INTEGER, {}, False),
        ({"const": "a"}, {"enum": ["b", "c"]}, True),
        ({"const": 1}, {"const": 1.0}, False),
        ({"const": 1}, {"const": True}, True),
        ({"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/square"}, True),
        ({"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/circle"}, False),
        ({"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/none"}, False),
        ({"$ref": "#/$defs/a%20b~1~0/anyOf/0"}, {"type": "string"}, True),
        (
            {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
            {"type": "object", "properties": {"kind": {"const": "b"}}},
            False,
        ),
        (
            {"properties": {"kind": {"const": "a"}}, "required": ["kind"]},
            {"properties": {"kind": {"const": "b"}}, "required": ["kind"]},
            False,
        ),
    ],
)
def test_alternatives_that_no_value_fits_both_of(one: Any, other: Any, disjoint: bool) -> None:
    definitions = {**DEFINITIONS, "a b/~": {"anyOf": [INTEGER]}}
    relaxer = SchemaRelaxer({"$defs": definitions, "oneOf": [one, other]})
    assert "anyOf" in relaxer.relax_root()
    assert (relaxer.relaxation_reasons() == []) == disjoint


def test_reasons_are_limited() -> None:
    many = {f"p{index}": UNIQUE for index in range(MAX_LISTED_REASONS + 5)}
    relaxer = SchemaRelaxer({"type": "object", "properties": many})
    relaxer.relax_root()
    reasons = relaxer.relaxation_reasons()
    assert len(reasons) == MAX_LISTED_REASONS + 1
    assert reasons[-1] == "5 further keywords are not enforced"
