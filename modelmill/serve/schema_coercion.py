"""JSON schemas that the grammar library cannot express, made weaker, with the reasons.

pydantic and other libraries write ``oneOf``, ``uniqueItems`` and ``contains``.
A schema is coerced only if it cannot be used as it is; the answer then matches the weaker schema,
and the response's ``warnings`` say what was not enforced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from modelmill.core.types import Grammar

NOT_ENFORCED = ("uniqueItems", "contains", "minContains", "maxContains")
_NAMED_SCHEMA_KEYS = ("properties", "patternProperties", "$defs", "definitions")
_VALUE_KEYS = ("enum", "const", "default", "examples")


def coerce_grammar(grammar: Grammar) -> tuple[Grammar, list[str]]:
    """Weaken the schemas of a grammar.

    Returns:
        The grammar, the same object if it needs no change, and what it does not enforce.
    """
    try:
        return _coerce_schemas(grammar)
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        return grammar, []


def _coerce_schemas(grammar: Grammar) -> tuple[Grammar, list[str]]:
    if grammar.grammar_type == "json":
        original = json.loads(grammar.text)
        schema, reasons = coerce_schema(original)
        same = schema == original
        return grammar if same else Grammar("json", json.dumps(schema)), reasons
    if grammar.grammar_type != "calls":
        return grammar, []
    value = json.loads(grammar.text)
    functions, all_reasons = [], list[str]()
    for function in value["functions"]:
        arguments, reasons = coerce_schema(function["arguments"])
        functions.append({**function, "arguments": arguments})
        all_reasons += [f"{function['name']}: {reason}" for reason in reasons]
    if functions == value["functions"]:
        return grammar, []
    return Grammar("calls", json.dumps({**value, "functions": functions})), all_reasons


def coerce_schema(schema: Any) -> tuple[Any, list[str]]:
    """Weaken a schema: the result, and a reason for each change."""
    reasons: dict[str, None] = {}
    return _coerce(schema, reasons), list(reasons)


def _limit_unique_items(schema: dict[str, Any]) -> None:
    """Of unique items there are at most as many as values: without it, a list might not end."""
    items = schema.get("items")
    values = items.get("enum") if isinstance(items, Mapping) else None
    if isinstance(values, list):
        most = schema.get("maxItems")
        schema["maxItems"] = min(most, len(values)) if type(most) is int else len(values)


def _coerce(schema: Any, reasons: dict[str, None]) -> Any:
    if isinstance(schema, list):
        return [_coerce(each, reasons) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NOT_ENFORCED:
            if value is not False:
                reasons[f"{key} is not enforced"] = None
        elif key in _NAMED_SCHEMA_KEYS and isinstance(value, Mapping):
            out[key] = {name: _coerce(each, reasons) for name, each in value.items()}
        else:
            out[key] = value if key in _VALUE_KEYS else _coerce(value, reasons)
    if schema.get("uniqueItems") is True:
        _limit_unique_items(out)
    if "oneOf" in out:
        reasons["oneOf is enforced as anyOf: an answer may fit several alternatives"] = None
        alternatives = {"anyOf": out.pop("oneOf")}
        if "anyOf" in out:
            out["allOf"] = [*out.get("allOf", []), alternatives]
        else:
            out |= alternatives
    return out
