"""Schemas that no finite value fits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.core.types import Grammar
from modelmill.text.endless_schemas import find_endless_reference
from modelmill.text.grammar import check_grammar

SELF: dict[str, Any] = {"$ref": "#"}
NODE: dict[str, Any] = {"$ref": "#/$defs/node"}


def with_a(schema: Any, *, required: bool = True) -> dict[str, Any]:
    """An object with one property."""
    return {
        "type": "object",
        "properties": {"a": schema},
        **({"required": ["a"]} if required else {}),
    }


def with_node(node: Any, schema: Any) -> dict[str, Any]:
    return {**schema, "$defs": {"node": node}}


ENDLESS = [
    SELF,
    with_a(SELF),
    with_a({"allOf": [SELF]}),
    with_a({"anyOf": [SELF, {"type": "array", "items": SELF, "minItems": 1}]}),
    with_a({"type": "array", "prefixItems": [SELF], "minItems": 1}),
    {"type": "array", "items": SELF, "minItems": 2},
    with_node(with_a(NODE), with_a(NODE)),
    # may be left out, but not ended
    with_node(with_a(NODE), with_a(NODE, required=False)),
    with_node(with_a(NODE), {"type": "array", "items": NODE}),
    with_node(with_a(NODE), {"type": "object", "patternProperties": {"^b": NODE}}),
    # not listed, so that it is an additional one
    {"type": "object", "additionalProperties": SELF, "required": ["a"]},
    with_a({"type": "null"}) | {"additionalProperties": SELF, "required": ["a", "b"]},
]
FINITE = [
    {},
    with_a(SELF, required=False),
    with_a({"anyOf": [SELF, {"type": "null"}]}),
    with_a({"oneOf": [{"type": "string"}, SELF]}),
    with_a({"type": "array", "items": SELF}),
    with_a({"type": "array", "prefixItems": [{"type": "null"}, SELF], "minItems": 1}),
    {"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]},
    with_node(with_a({"anyOf": [NODE, {"type": "integer"}]}), with_a(NODE)),
    with_a({"$ref": "elsewhere.json"}),
    with_a({"$ref": "#/$defs/none"}),
    with_a(SELF) | {"required": "a"},
    with_a(True),
    {"type": "object", "additionalProperties": SELF},
    {"type": "object", "patternProperties": {"^a": SELF}},
    with_a({"type": "null"}) | {"additionalProperties": SELF},
    {
        "type": "object",
        "patternProperties": {"^a": {"type": "null"}},
        "additionalProperties": SELF,
        "required": ["a"],
    },
]


@pytest.mark.parametrize("schema", ENDLESS, ids=json.dumps)
def test_an_endless_part_is_found(schema: dict[str, Any]) -> None:
    assert find_endless_reference(schema) in ("#", "#/$defs/node")


@pytest.mark.parametrize("schema", FINITE, ids=json.dumps)
def test_what_can_end_is_taken(schema: dict[str, Any]) -> None:
    assert find_endless_reference(schema) is None


def test_pointers_are_unescaped() -> None:
    node = with_a({"$ref": "#/$defs/a~1b%20~0"})
    assert find_endless_reference({"$defs": {"a/b ~": node}, "$ref": "#/$defs/a~1b%20~0"})


@pytest.mark.parametrize("last", [{"type": "null"}, with_a({"$ref": "#/$defs/0"})])
def test_a_long_chain_takes_one_pass(last: dict[str, Any]) -> None:
    size = 20_000
    chain = {str(i): with_a({"$ref": f"#/$defs/{i + 1}"}) for i in range(size)}
    schema = {"$ref": "#/$defs/0", "$defs": {**chain, str(size): last}}
    assert (find_endless_reference(schema) is None) == (last == {"type": "null"})


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (
            Grammar("json", json.dumps(with_a(SELF))),
            "the JSON schema cannot be used: '#' requires itself, so that no value of it ends; "
            "leave it out of required, or allow null",
        ),
        (
            Grammar(
                "calls",
                json.dumps(
                    {
                        "functions": [
                            {"name": "fine", "arguments": with_a({})},
                            {"name": "wrong", "arguments": with_a(SELF)},
                        ],
                        "most": 1,
                    }
                ),
            ),
            "the parameters of wrong: the JSON schema cannot be used: '#' requires itself",
        ),
        (Grammar("json", json.dumps(SELF)), "it has no text"),
        (Grammar("regex", r"[^\s\S]"), "the regex cannot be used: it has no text"),
        (Grammar("lark", "start: start"), "the grammar cannot be used: it has no text"),
    ],
)
def test_the_check_refuses_it_before_an_answer_begins(grammar: Grammar, message: str) -> None:
    with pytest.raises(RequestError) as raised:
        check_grammar(grammar)
    assert message in str(raised.value)
