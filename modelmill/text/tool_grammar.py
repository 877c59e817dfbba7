"""Grammar of forced tool calls: a function's name, and arguments that fit its parameters."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.core.types import Grammar
from modelmill.text.parameter_types import resolve_pointer

Schema = Mapping[str, Any]
MAX_CONSTRAINED_CALLS = 16
"""Maximum calls of one forced answer."""
MAX_ONEOF_PAIRS = 2048
"""Maximum pairs of a schema's alternatives (oneOf) that are compared."""
_CONJUNCTION_KEYS = (
    "allOf",
    "if",
    "not",
    "dependentSchemas",
    "unevaluatedProperties",
    "$dynamicRef",
)
_NAMED_SCHEMA_KEYS = ("properties", "patternProperties", "$defs", "definitions")
"""Keys whose value maps names to schemas; a name may be any string, also "properties"."""
_VALUE_KEYS = ("enum", "const", "default", "examples")
_OBJECT_KEYS = ("properties", "required", "patternProperties", "additionalProperties")


def forced_call_grammar(
    tools: Sequence[Schema], name: str | None, several: bool = False
) -> Grammar:
    """Return the grammar of an answer that is only a call, in the bare style.

    Args:
        tools: definitions of the tools.
        name: the tool to call; None: any of them.
        several: whether the answer is a list of 1 to MAX_CONSTRAINED_CALLS calls instead.

    Raises:
        RequestError: if a function's parameters are not an object.
    """
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    declared = [
        {"name": function["name"], "arguments": closed_arguments_schema(function)}
        for function in functions
    ]
    return Grammar(
        "calls",
        json.dumps({"functions": declared, "most": MAX_CONSTRAINED_CALLS if several else None}),
    )


def optional_strict_call_grammar(
    tools: Sequence[Schema], several: bool, *, as_json: bool
) -> Grammar | None:
    """Return the grammar of an answer that may have calls; None if no function is strict.

    Args:
        tools: definitions of the tools.
        several: whether the answer may have several calls.
        as_json: whether arguments are written as JSON; a function that is not strict then takes any
            object.

    Raises:
        RequestError: if a function's parameters are not an object.
    """
    if not any(tool["function"].get("strict") for tool in tools):
        return None
    return _optional_call_grammar(tools, several, as_json=as_json, more={"optional": True})


def call_or_schema_grammar(
    tools: Sequence[Schema], several: bool, schema: Any, *, as_json: bool
) -> Grammar:
    """Return the grammar of an answer that is calls, or content that a schema holds.

    Args:
        tools: definitions of the tools.
        several: whether the answer may have several calls.
        schema: JSON schema of the content.
        as_json: see ``optional_strict_call_grammar``.

    Raises:
        RequestError: if the parameters of a strict function are not an object.
    """
    return _optional_call_grammar(tools, several, as_json=as_json, more={"content": schema})


def _optional_call_grammar(
    tools: Sequence[Schema], several: bool, *, as_json: bool, more: Mapping[str, Any]
) -> Grammar:
    functions = [tool["function"] for tool in tools]
    declared = [
        {
            "name": function["name"],
            "arguments": closed_arguments_schema(function)
            if function.get("strict") or not as_json
            else {"type": "object"},
        }
        for function in functions
    ]
    most = MAX_CONSTRAINED_CALLS if several else None
    return Grammar("calls", json.dumps({"functions": declared, "most": most, **more}))


def closed_arguments_schema(function: Schema) -> dict[str, Any]:
    """Return the schema of a function's arguments; a value that fits it fits the parameters.

    Only properties that the parameters name are allowed, unless they set additionalProperties or
    patternProperties. A function without parameters has the arguments {}.

    Raises:
        RequestError: if the parameters are not an object.
    """
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    declared_type = parameters.get("type", "object")
    if declared_type != "object" and not (
        isinstance(declared_type, list) and "object" in declared_type
    ):
        raise RequestError(f"tools: the parameters of {function['name']} must have the type object")
    return forbid_additional_properties({**parameters, "type": "object"})


def forbid_additional_properties(schema: Schema) -> dict[str, Any]:
    """Forbid properties that a schema does not name; a value that fits the result fits the schema.

    Unchanged are objects that set additionalProperties or patternProperties, and combined schemas:
    closing one part of a conjunction would exclude the properties of the other parts, and closing
    an alternative of oneOf could admit values that fit two alternatives.
    """
    parts = _collect_subschemas(schema)
    if any(map(_is_conjunction, parts)):
        return dict(schema)
    pairs = (
        pair
        for part in parts
        for pair in itertools.permutations(_list_or_empty(part.get("oneOf")), 2)
    )
    first_pairs = list(itertools.islice(pairs, MAX_ONEOF_PAIRS + 1))
    if len(first_pairs) > MAX_ONEOF_PAIRS or not all(
        _are_disjoint(a, b, schema) for a, b in first_pairs
    ):
        return dict(schema)
    return _close_schema(schema)


def _close_schema(schema: Schema) -> dict[str, Any]:
    out = _map_subschemas(schema, _close_schema)
    if _can_close_schema(schema):
        # required properties without a schema are allowed, too
        missing: dict[str, Any] = {
            name: {} for name in sorted(_required_names(schema)) if name not in out["properties"]
        }
        out |= {"properties": {**out["properties"], **missing}, "additionalProperties": False}
    return out


def _can_close_schema(schema: Schema) -> bool:
    named = isinstance(schema.get("properties"), Mapping)
    return named and not any(key in schema for key in ("additionalProperties", "patternProperties"))


def _is_conjunction(schema: Schema) -> bool:
    """Whether a value must fit several parts at once."""
    parts = (
        any(key in schema for key in _OBJECT_KEYS),
        *(key in schema for key in ("$ref", "anyOf", "oneOf")),
    )
    return sum(parts) > 1 or any(key in schema for key in _CONJUNCTION_KEYS)


def _are_disjoint(a: Any, b: Any, root: Schema) -> bool:
    """Whether no value that fits ``a``, closed, can fit ``b``; False if this simple test fails."""
    a, b = _resolve_ref(a, root), _resolve_ref(b, root)
    if a is None or b is None:
        return False
    if _has_no_subschemas(a) and _has_no_subschemas(b):
        return True  # closing changes neither; llguidance compares them
    one, other = _declared_types(a), _declared_types(b)
    if one and other and not one & other:
        return True
    if any(key in each for key in ("items", "prefixItems") for each in (a, b)) and {
        "object"
    } not in (one, other):
        return False
    properties_a, properties_b = (
        each["properties"] if isinstance(each.get("properties"), Mapping) else {} for each in (a, b)
    )
    needed = _required_names(a)
    if _can_close_schema(a) and not _required_names(b) <= needed | properties_a.keys():
        return True
    shared = [
        (_allowed_strings(properties_a[name]), _allowed_strings(properties_b[name]))
        for name in needed
        if name in properties_a and name in properties_b
    ]
    return any(here and there and not here & there for here, there in shared)


def _has_no_subschemas(schema: Schema) -> bool:
    return not any(
        key in schema for key in ("$ref", "items", "prefixItems", "anyOf", "oneOf", *_OBJECT_KEYS)
    )


def _required_names(schema: Schema) -> set[str]:
    return {name for name in _list_or_empty(schema.get("required")) if isinstance(name, str)}


def _declared_types(schema: Schema) -> set[str]:
    """Return the declared types of a schema's values; empty if it declares none."""
    declared = schema.get("type")
    type_names = {
        each
        for each in (declared if isinstance(declared, list) else [declared])
        if isinstance(each, str)
    }
    return type_names | {"integer"} if "number" in type_names else type_names


def _allowed_strings(schema: Any) -> set[str]:
    """Return the strings of an enum or const; empty if other values fit, too."""
    values = (
        _list_or_empty(schema.get("enum", [schema.get("const")]))
        if isinstance(schema, Mapping)
        else []
    )
    return set(values) if values and all(isinstance(value, str) for value in values) else set()


def _resolve_ref(schema: Any, root: Schema) -> Schema | None:
    """Return a schema, or the definition that it refers to; None if that does not exist."""
    if not isinstance(schema, Mapping) or "$ref" not in schema:
        return schema if isinstance(schema, Mapping) else None
    target = resolve_pointer(schema["$ref"], root) if len(schema) == 1 else None
    return target if isinstance(target, Mapping) and "$ref" not in target else None


def _collect_subschemas(schema: Schema) -> list[Schema]:
    """Return a schema and all schemas in it."""
    schemas = [schema]

    def add(part: Schema) -> Schema:
        schemas.extend(_collect_subschemas(part))
        return part

    _map_subschemas(schema, add)
    return schemas


def _map_subschemas(schema: Schema, change: Callable[[Schema], Any]) -> dict[str, Any]:
    """Copy a schema with ``change`` applied to its direct subschemas."""

    def part(value: Any) -> Any:
        if isinstance(value, Mapping):
            return change(value)
        return [part(each) for each in value] if isinstance(value, list) else value

    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMA_KEYS and isinstance(value, Mapping):
            out[key] = {name: part(each) for name, each in value.items()}
        else:
            out[key] = value if key in _VALUE_KEYS else part(value)
    return out


def _list_or_empty(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
