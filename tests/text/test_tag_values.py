"""Schemas of nested tags, and the JSON of their values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.text.tag_values import TagNode, child_schema

ROOT = {"$defs": {"a": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
ENDLESS = {"$defs": {"a": {"$ref": "#/$defs/a"}}}
LIST = {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}}
# schema of the outer value, tag and place of the inner one, schema of the inner one
CHILDREN: list[tuple[Any, str, int, Any]] = [
    ({"$ref": "#/$defs/a"}, "x", 0, {"type": "integer"}),
    ({"oneOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}, "x", 0, {"type": "integer"}),
    ({"properties": {"x": {}}, "additionalProperties": {"type": "null"}}, "y", 0, {"type": "null"}),
    ({"properties": {"x": {}}, "additionalProperties": False}, "y", 0, None),
    (LIST, "item", 0, {"type": "integer"}),
    (LIST, "item", 1, {"type": "string"}),
    (LIST, "element", 1, {"type": "string"}),
    ({"anyOf": 3, "properties": 1}, "x", 0, None),
    (None, "x", 0, None),
    (True, "x", 0, None),
]


@pytest.mark.parametrize(("schema", "tag", "index", "inner"), CHILDREN)
def test_the_schema_of_an_inner_tag(schema: Any, tag: str, index: int, inner: Any) -> None:
    assert child_schema(schema, tag, index, ROOT) == inner


def test_a_reference_to_itself_declares_nothing() -> None:
    assert child_schema({"$ref": "#/$defs/a"}, "x", 0, ENDLESS) is None


# schema, text, value
LEAVES: list[tuple[Any, str, Any]] = [
    (None, "1", "1"),
    ({}, "1", 1),
    ({}, "one", "one"),
    ({"type": "string"}, "true", "true"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "none", "none"),
    ({"type": "integer"}, "-007", -7),
    ({"type": "number"}, "1e3", 1000.0),
    ({"type": "boolean"}, "true", True),
    ({"enum": ["none", "low"]}, "none", "none"),
    ({"type": "array"}, "", []),
    ({"type": "object"}, "\n", {}),
    ({"type": "object"}, '{"a": 1}', {"a": 1}),
]


@pytest.mark.parametrize(("schema", "text", "value"), LEAVES)
def test_the_type_of_a_text_is_the_declared_one(schema: Any, text: str, value: Any) -> None:
    result = json.loads(TagNode("x", schema, [text]).to_json({}))
    assert result == value
    assert type(result) is type(value)


def test_numbers_keep_their_text() -> None:
    assert TagNode("x", {"type": "number"}, ["1.50"]).to_json({}) == "1.50"
