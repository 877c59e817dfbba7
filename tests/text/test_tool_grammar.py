"""A call that is forced names one of the functions, and its arguments are what that function's
parameters ask for.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.core.types import Grammar
from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import collect_content_and_calls
from modelmill.text.chat_format_registry import load_chat_syntax
from modelmill.text.grammar import check_grammar
from modelmill.text.tool_grammar import (
    closed_arguments_schema,
    forbid_additional_properties,
    forced_call_grammar,
)
from tests.text.random_schemas import GUIDES, is_endless, is_valid, random_answer, random_parameters


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def takes(grammar: Grammar, text: str) -> bool:
    """Whether a grammar takes a whole text."""
    guide = GUIDES.make_guide(grammar, (256,))
    for id in (*text.encode(), 256):
        if not guide.mask()[id >> 3] >> (id & 7) & 1:
            return False
        guide.accept(id)
    return True


def call(value: Any, name: str = "f") -> str:
    return json.dumps({"name": name, "arguments": value})


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("start", range(0, 120, 40))
def test_what_a_forced_call_writes_is_a_call_that_the_function_takes(
    start: int, several: bool
) -> None:
    """Random parameters, random answers: one of the names, arguments that fit; nothing is refused
    without need.
    """
    ended = 0
    for seed in range(start, start + 40):
        rng = random.Random(seed)
        own = {name: usable(rng) for name in ("f", "g")}
        grammar = forced_call_grammar(
            [tool(name, schema) for name, schema in own.items()], None, several
        )
        check_grammar(grammar)
        text = random_answer(grammar, rng)
        if text is None:
            continue
        ended += 1
        parser = make_answer_parser(load_chat_syntax("json"), ["f", "g"], forced=True)
        pieces = [piece for char in text for piece in parser.push(char)]
        content, calls = collect_content_and_calls([*pieces, *parser.flush()])
        assert content == ""
        assert 1 <= len(calls) <= (16 if several else 1)
        for each in calls:
            value = json.loads(each.arguments)
            assert isinstance(value, dict)
            assert is_valid(value, own[each.name], own[each.name]), (text, own[each.name])
    assert ended > 30


def usable(rng: random.Random) -> dict[str, Any]:
    """Parameters that describe an object, as far as the grammar's library can say it."""
    while not _usable(parameters := random_parameters(rng)):
        pass
    return parameters


def _usable(schema: dict[str, Any]) -> bool:
    schema_type = schema.get("type", "object")
    if is_endless(schema):
        return False
    try:
        check_grammar(Grammar("json", json.dumps({**schema, "type": "object"})))
    except RequestError:
        return False
    return schema_type == "object" or "object" in schema_type


TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "child": {"$ref": "#"}},
    "required": ["v"],
}
INNER = {"type": "object", "properties": {"x": {"type": "string"}}}
WHERE: list[tuple[dict[str, Any], Any, Any]] = [
    (TREE, {"v": 1, "child": {"v": 2}}, {"v": 1, "child": json.loads(call({"v": 2}))}),
    (
        {"type": "object", "properties": {"a": INNER, "b": {"$ref": "#/properties/a"}}},
        {"b": {"x": "1"}},
        {"b": 1},
    ),
    (
        {"$defs": {"X": {"const": 1}}, "properties": {"a": {"$ref": "#/$defs/X"}}},
        {"a": 1},
        {"a": 2},
    ),
    (
        {"definitions": {"X": {"const": 1}}, "properties": {"a": {"$ref": "#/definitions/X"}}},
        {"a": 1},
        {"a": 2},
    ),
    (
        {"$ref": "#/$defs/X", "$defs": {"X": {"properties": {"a": {"const": 1}}}}},
        {"a": 1},
        {"a": 2},
    ),
    (
        {"properties": {"a b/~": {"const": 1}, "c": {"$ref": "#/properties/a%20b~1~0"}}},
        {"c": 1},
        {"c": 2},
    ),
    ({"properties": {"a": {"$anchor": "q", "const": 1}, "b": {"$ref": "#q"}}}, {"b": 1}, {"b": 2}),
    (
        {"$id": "urn:x", "properties": {"a": {"const": 1}, "b": {"$ref": "#/properties/a"}}},
        {"b": 1},
        {"b": 2},
    ),
    (
        {"properties": {"$ref": {"const": 1}, "b": {"$ref": "#/properties/$ref"}}},
        {"b": 1},
        {"b": 2},
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), WHERE, ids=range(len(WHERE)))
@pytest.mark.parametrize("several", [False, True])
def test_references_find_what_they_find_in_the_parameters(
    schema: Any, good: Any, bad: Any, several: bool
) -> None:
    """Wherever these stand within a call, and whatever another function calls the same."""
    other = {
        "type": "object",
        "properties": {"z": {"$ref": "#/$defs/X"}},
        "$defs": {"X": {"const": 9}},
    }
    grammar = forced_call_grammar([tool("f", schema), tool("g", other)], None, several)
    check_grammar(grammar)
    for value, name, fine in (
        (good, "f", True),
        (bad, "f", False),
        ({"z": 9}, "g", True),
        ({"z": 1}, "g", False),
    ):
        text = f"[{call(value, name)}, {call(good)}]" if several else call(value, name)
        assert takes(grammar, text) is fine, text
    assert not takes(
        forced_call_grammar([tool("f", schema), tool("g", other)], "f"), call({"z": 9}, "g")
    )


@pytest.mark.parametrize(
    ("schema", "fine", "none"),
    [
        (None, ["{}"], ['{"a": 1}', "10", "null"]),
        ({}, ["{}", '{"a": 1}'], ["10", '"x"', "[]", "null"]),
        ({"description": "nothing"}, ["{}"], ["10", "[]"]),
        (
            {"properties": {"a": {"type": "string"}}},
            ["{}", '{"a": "x"}'],
            ["10", "[]", '{"a": 1}', '{"b": 1}'],
        ),
        (
            {"type": ["object", "null"], "properties": {"a": {}}},
            ["{}", '{"a": 1}'],
            ["null", '{"b": 1}'],
        ),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, ["{}"], ['"x"']),
        ({"enum": [1, {"a": 2}]}, ['{"a": 2}'], ["1", "{}"]),
        ({"$ref": "#/$defs/X", "$defs": {"X": {"type": ["string", "object"]}}}, ["{}"], ['"x"']),
    ],
    ids=range(8),
)
def test_arguments_are_an_object_whatever_the_parameters_say(
    schema: Any, fine: list[str], none: list[str]
) -> None:
    function = {"name": "f"} if schema is None else {"name": "f", "parameters": schema}
    grammar = forced_call_grammar([{"type": "function", "function": function}], None)
    check_grammar(grammar)
    for texts, takes_it in ((fine, True), (none, False)):
        for text in texts:
            assert takes(grammar, f'{{"name": "f", "arguments": {text}}}') is takes_it, text


@pytest.mark.parametrize("schema_type", ["string", "odd", None, 3, [], ["null"], {}])
def test_parameters_of_another_type_are_refused(schema_type: Any) -> None:
    with pytest.raises(RequestError, match="tools: the parameters of f must have the type object"):
        forced_call_grammar([tool("f", {"type": schema_type})], None)


@pytest.mark.parametrize(
    "schema",
    [{"const": 5}, {"properties": {"a": {"type": "odd"}}}, {"$ref": "#/$defs/no"}],
    ids=str,
)
def test_the_function_at_fault_is_named(schema: Any) -> None:
    with pytest.raises(
        RequestError, match=r"^the parameters of bad: the JSON schema cannot be used: "
    ) as error:
        check_grammar(
            forced_call_grammar([tool("fine", {"type": "object"}), tool("bad", schema)], None)
        )
    assert "\n" not in str(error.value)


OPEN = {
    "type": "object",
    "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}},
}


def test_arguments_are_closed() -> None:
    """A function takes what its parameters name; what says itself what else it takes is left as it
    is.
    """
    assert closed_arguments_schema({"name": "f"}) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    schema = forbid_additional_properties(OPEN)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["a"]["additionalProperties"] is False
    for same in (
        {"type": "object"},
        {**OPEN, "allOf": [{"properties": {"c": {}}}]},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"x": {}}},
        {"type": "object", "properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        {
            "type": "object",
            "properties": {"a": {"enum": [{"properties": {}}]}},
            "additionalProperties": True,
        },
    ):
        assert forbid_additional_properties(same) == same


def test_closing_shuts_nothing_out_that_is_needed() -> None:
    needs = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["z"]}
    assert takes(forced_call_grammar([tool("f", needs)], None), call({"z": 3}))
    # properties that bear a keyword's name are properties
    odd = {
        "type": "object",
        "properties": {"if": {"const": 1}, "properties": {"properties": {"a": {}}}},
    }
    grammar = forced_call_grammar([tool("f", odd)], None)
    assert takes(grammar, call({"if": 1, "properties": {"a": 2}}))
    for none in ({"b": 1}, {"properties": {"b": 1}}, {"properties": {"additionalProperties": 1}}):
        assert not takes(grammar, call(none))
    # a definition that is put together with more elsewhere
    base = {"Base": {"type": "object", "properties": {"a": {"const": 1}}}}
    more = {
        "type": "object",
        "$defs": base,
        "$ref": "#/$defs/Base",
        "properties": {"b": {}},
        "required": ["b"],
    }
    assert takes(forced_call_grammar([tool("f", more)], None), call({"a": 1, "b": 2}))


def test_definitions_of_two_functions_do_not_meet() -> None:
    def own(definition: Any) -> dict[str, Any]:
        return {"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": definition}}

    nested = {"type": "array", "items": {"$ref": "#/$defs/X"}}
    offered = [
        tool("f", own({"type": "integer"})),
        tool("g", own({"type": "string"})),
        tool("h", own(nested)),
    ]
    fitting = {"f": 1, "g": "1", "h": [[], [[]]]}
    for several in (False, True):
        grammar = forced_call_grammar(offered, None, several)
        check_grammar(grammar)
        for name in fitting:
            for of, value in fitting.items():
                text = call({"x": value}, name)
                assert takes(grammar, f"[{text}]" if several else text) is (of == name)


def one_of(*each: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": {"oneOf": list(each)}}}


def object_schema(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def test_of_kinds_that_exclude_each_other_one_fits() -> None:
    """Closed, {"a": 1} would fit the first kind alone; as they were given, it fits both."""
    one = object_schema(["a"], a={"type": "integer"})
    assert forbid_additional_properties(
        one_of(one, {"type": "object", "properties": {}})
    ) == one_of(one, {"type": "object", "properties": {}})
    for first, other in (
        (one, object_schema(["b"], b={})),
        (
            object_schema(["t"], t={"const": "x"}, a={}),
            object_schema(["t"], t={"enum": ["y", "z"]}),
        ),
        ({"type": "string"}, one),
    ):
        branches = forbid_additional_properties(one_of(first, other))["properties"]["k"]["oneOf"]
        assert branches[1]["additionalProperties"] is False
        check_grammar(forced_call_grammar([tool("f", one_of(first, other))], None))
    definitions = {"a b/~": {"oneOf": [one]}, "c": object_schema(["b"], b={})}
    refs = [{"$ref": "#/$defs/a%20b~1~0/oneOf/0"}, {"$ref": "#/$defs/c"}]
    closed = forbid_additional_properties({**one_of(*refs), "$defs": definitions})
    assert closed["$defs"]["c"]["additionalProperties"] is False, "a pointer has escapes and places"
    many = one_of(*(object_schema(["t"], t={"const": f"k{place}"}) for place in range(2000)))
    assert forbid_additional_properties(many) == many
