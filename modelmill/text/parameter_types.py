"""Types of arguments that a format writes without quotes: is a value a string, or JSON?"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from modelmill.text.json_normalizer import NON_FINITE_WORDS, normalize_json, split_json_object
from modelmill.text.tokenizer_base import replace_surrogates

NON_STRING_JSON_TYPES = frozenset(("null", "boolean", "integer", "number", "array", "object"))
EVERY_JSON_TYPE = NON_STRING_JSON_TYPES | {"string"}
MAX_REF_CHAIN_LENGTH = 32
"""Maximum references of a schema that are followed one after the other."""
MAX_SCHEMA_PARTS = 128
"""Maximum references and alternatives of a schema that are read for one argument."""
_ANY_CASE_WORDS = {
    **{"true": "true", "false": "false"},
    **dict.fromkeys(("null", "none", "nil"), "null"),
}
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ParameterType:
    """Type of an argument.

    Attributes:
        is_string: its value is always a string.
        json_types: types that its value has if its text is JSON of that type; else it is a string.
        takes_string: whether a string is one of the values that the tool takes.
    """

    is_string: bool
    json_types: frozenset[str]
    takes_string: bool = True


def resolve_parameter_type(
    parameters: Mapping[str, Any] | None, key: str, undeclared: str, attribute: bool | None = None
) -> ParameterType:
    """Return the type of an argument.

    Args:
        parameters: JSON schema of the tool's parameters.
        key: name of the argument.
        undeclared: "string" or "json": type of an argument without a declaration.
        attribute: whether the model wrote that it is a string; None if it did not say. The schema
            has priority.
    """
    root = parameters or {}
    schema = _child_schema(root, key, root)
    if attribute is not None and (not isinstance(schema, Mapping) or not schema):
        return ParameterType(attribute, frozenset() if attribute else NON_STRING_JSON_TYPES)
    if not isinstance(schema, Mapping):
        return ParameterType(undeclared == "string", NON_STRING_JSON_TYPES)
    types = schema_types(schema, root)
    return make_parameter_type(types)


def make_parameter_type(types: Set[str]) -> ParameterType:
    """Return the type of an argument that can have these types of JSON."""
    json_types = NON_STRING_JSON_TYPES.intersection(types)
    return ParameterType(types == {"string"}, json_types, "string" in types)


def is_declared_string(
    parameters: Mapping[str, Any] | None, key: str, path: Sequence[str] = ()
) -> bool:
    """Whether a tool declares a value as a string, and as nothing else but null.

    Args:
        parameters: JSON schema of the tool's parameters.
        key: name of the argument.
        path: keys inside it; "" for an element of a list.
    """
    root = parameters or {}
    schema: Any = root
    for step in (key, *path):
        schema = _child_schema(schema, step, root)
        if schema is None:
            return False
    return schema_types(schema, root) - {"null"} == {"string"}


def _child_schema(
    schema: Any, step: str, root: Mapping[str, Any], memo: dict[int, Any] | None = None
) -> Any:
    """The schema of a member, or with "" of an element of a list; None if it is not declared.

    Of alternatives those count that declare it: as one schema with anyOf.

    Args:
        schema: of the object or the list.
        step: key of the member.
        root: schema of all arguments, for references.
        memo: of the schemas that were read already, by identity: none is read twice.
    """
    memo = {} if memo is None else memo
    if not isinstance(schema, Mapping) or len(memo) > MAX_SCHEMA_PARTS:
        return None
    if id(schema) in memo:
        return memo[id(schema)]
    memo[id(schema)] = None  # a schema that refers to itself adds nothing
    parts = [_child_schema(each, step, root, memo) for each in required_parts(schema, root)]
    members = schema.get("properties")
    if step and isinstance(members, Mapping) and step in members:
        parts.append(members[step])
    else:
        others = schema.get("additionalProperties" if step else "items")
        # {} says only that others may come
        parts.append(others if isinstance(others, Mapping) and others else None)
    for alternatives in alternative_parts(schema):
        declared = [_child_schema(each, step, root, memo) for each in alternatives]
        parts.append(_combine_schemas("anyOf", declared))
    memo[id(schema)] = _combine_schemas("allOf", parts)
    return memo[id(schema)]


def _combine_schemas(key: str, schemas: Sequence[Any]) -> Any:
    """One schema for those that are not None; None if all are."""
    declared = [each for each in schemas if each is not None]
    if len(declared) < 2:
        return declared[0] if declared else None
    return {key: declared}


def required_parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any]:
    """Return the schemas that hold beside a schema's own keys: of its $ref and allOf."""
    parts = [resolve_pointer(schema["$ref"], root)] if "$ref" in schema else []
    every = schema.get("allOf")
    return [*parts, *(every if isinstance(every, list) else ())]


def alternative_parts(schema: Mapping[str, Any]) -> list[list[Any]]:
    """Return the groups of schemas of which one holds: of anyOf and of oneOf."""
    groups = (schema.get(key) for key in ("anyOf", "oneOf"))
    return [group for group in groups if isinstance(group, list)]


def schema_types(
    schema: Any, root: Mapping[str, Any], memo: dict[int, set[str]] | None = None
) -> set[str]:
    """Return the types that a schema's values can have; all of them if it does not say.

    Args:
        schema: of the values.
        root: schema of all arguments, for references.
        memo: types of the schemas that were read already, by identity: none is read twice.
    """
    memo = {} if memo is None else memo
    if not isinstance(schema, Mapping) or len(memo) > MAX_SCHEMA_PARTS:
        return set(EVERY_JSON_TYPE)
    if id(schema) not in memo:
        memo[id(schema)] = set(EVERY_JSON_TYPE)  # what a schema that refers to itself adds
        memo[id(schema)] = _read_schema_types(schema, root, memo)
    return memo[id(schema)]


def _read_schema_types(
    schema: Mapping[str, Any], root: Mapping[str, Any], memo: dict[int, set[str]]
) -> set[str]:
    if "$ref" in schema:
        return schema_types(resolve_pointer(schema["$ref"], root), root, memo)
    if "const" in schema:
        return {_json_type_of_value(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {_json_type_of_value(value) for value in schema["enum"]}
    declared = schema.get("type")
    if declared is not None:
        listed = declared if isinstance(declared, list) else [declared]
        if not all(isinstance(each, str) and each in EVERY_JSON_TYPE for each in listed):
            return set(EVERY_JSON_TYPE)  # no type of JSON Schema, such as "float"
        types = set(listed)
        return types | {"integer"} if "number" in types else types
    for group in alternative_parts(schema):
        return set().union(*(schema_types(each, root, memo) for each in group))
    if isinstance(schema.get("allOf"), list) and schema["allOf"]:
        return set.intersection(*(schema_types(each, root, memo) for each in schema["allOf"]))
    return set(EVERY_JSON_TYPE)


def resolve_pointer(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return what a reference like #/$defs/x points to; None if that does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: Any = root
    for step in filter(None, unquote(reference[1:]).split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, Mapping) and name in target:
            target = target[name]
        else:
            return None
    return target


def argument_text_to_json(text: str, types: ParameterType) -> str:
    """Return the JSON of an argument that is not always a string.

    A value that a model puts into quotes is read without them, where the tool takes no string. If
    it takes one, too, quotes tell a string from another value: "null" in quotes is the word.
    """
    word = text.strip()
    value = _word_to_json(word, types)
    if value is None and types.json_types != NON_STRING_JSON_TYPES:
        inner = _remove_quotes(word)
        value = None if inner is None else _word_to_json(inner.strip(), types)
        if value is not None and types.takes_string:
            value = json.dumps(inner, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if value is None else value


def _word_to_json(word: str, types: ParameterType) -> str | None:
    """The JSON of a text that is of one of the types; None if it is of none."""
    value = None if word in NON_FINITE_WORDS else normalize_json(word)
    if value is None and types.json_types & {"array", "object"}:
        value = _unescape_json_text(word)
    if value is None and not types.takes_string:
        value = _ANY_CASE_WORDS.get(word.lower())
    value_type = "" if value is None else json_type_of_text(value)
    as_number = value_type == "number" and "integer" in types.json_types
    return value if value_type in types.json_types or as_number else None


def _remove_quotes(word: str) -> str | None:
    """The text of a JSON string, whose quotes may have an escape; None if it is none."""
    if len(word) < 2 or word[-1] not in "\"'" or word[0] not in "\"'\\":
        return None
    value = _parse_json_string(f'"{word}"') if word[0] == "\\" else word
    normal = None if value is None else normalize_json(value)
    return None if normal is None or normal[:1] != '"' else _parse_json_string(normal)


def _parse_json_string(text: str) -> str | None:
    try:
        return replace_surrogates(json.loads(text, strict=False))
    except ValueError:
        return None


def coerce_arguments_to_schema(arguments: str, parameters: Mapping[str, Any] | None) -> str:
    """Return a call's arguments with the types that its tool declares.

    A string becomes the value of which it is the text where the tool declares a type and takes no
    string; a number or a word becomes its text where the tool takes a string or null only.

    Args:
        arguments: a JSON object; it stays as it is written where no type differs.
        parameters: JSON schema of the tool's parameters.
    """
    pairs = split_json_object(arguments) or []
    declared = [(key, _coerce_argument(key, value, parameters)) for key, value in pairs]
    if declared == pairs:
        return arguments
    members = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in declared)
    return f"{{{', '.join(members)}}}"


def _coerce_argument(key: str, value: str, parameters: Mapping[str, Any] | None) -> str:
    root = parameters or {}
    types = schema_types(_child_schema(root, key, root), root)
    written = json_type_of_text(value)
    if types - {"null"} == {"string"} and written in ("boolean", "integer", "number"):
        return json.dumps(value)
    if written != "string" or "string" in types:
        return value  # what the model wrote as a string may be one
    typed = argument_text_to_json(json.loads(value), make_parameter_type(types))
    return value if json_type_of_text(typed) == "string" else typed


def _unescape_json_text(text: str) -> str | None:
    """Convert a list or an object that is written as the inside of a JSON string."""
    if text[:1] not in ("[", "{") or '\\"' not in text:
        return None
    try:
        inner = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return None
    # half a pair cannot be sent; in the JSON it stays an escape
    return normalize_json(_SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", inner))


def json_type_of_text(value: str) -> str:
    """Return the type of a JSON text that is not a string; "string" for a string."""
    first = value[:1]
    named = {
        '"': "string",
        "{": "object",
        "[": "array",
        "n": "null",
        "t": "boolean",
        "f": "boolean",
    }
    if first in named:
        return named[first]
    return "number" if any(char in value for char in ".eE") else "integer"


def _json_type_of_value(value: Any) -> str:
    return json_type_of_text(json.dumps(value))
