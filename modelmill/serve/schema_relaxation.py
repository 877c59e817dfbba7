"""JSON schemas that the grammar library cannot express, made weaker, with the reasons.

pydantic and other libraries write ``oneOf``, ``uniqueItems``, ``contains``, names of properties as
``propertyNames``, formats of strings beyond those that the library knows, and patterns that look
around.
A schema is coerced only if it cannot be used as it is; the answer then matches the weaker schema,
and the response's ``warnings`` say what was not enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote
from modelmill.core.types import Grammar
from modelmill.text.grammar import check_grammar

ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats of strings that the grammar library enforces."""
_PROPERTY_NAME_KEYS = frozenset(("type", "title", "description"))
"""What propertyNames may say beside the names themselves."""
_NUMBER_TYPES = ("integer", "number")
_UNSUPPORTED_PATTERN = re.compile(r"\(\?<?[=!]|\\[1-9]")
UNENFORCED_KEYWORDS = ("uniqueItems", "contains", "minContains", "maxContains")
_NAMED_SCHEMA_KEYS = ("properties", "patternProperties", "$defs", "definitions")
_VALUE_KEYS = ("enum", "const", "default", "examples")


def relax_grammar(grammar: Grammar) -> tuple[Grammar, list[str]]:
    """Weaken the schemas of a grammar.

    Returns:
        The grammar, the same object if it needs no change, and what it does not enforce.
    """
    try:
        return _relax_schemas(grammar)
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        return grammar, []


def _relax_schemas(grammar: Grammar) -> tuple[Grammar, list[str]]:
    if grammar.grammar_type == "json":
        original = json.loads(grammar.text)
        schema, reasons = relax_schema(original)
        same = schema == original
        return grammar if same else Grammar("json", json.dumps(schema)), reasons
    if grammar.grammar_type != "calls":
        return grammar, []
    value = json.loads(grammar.text)
    functions, all_reasons = [], list[str]()
    for function in value["functions"]:
        arguments, reasons = relax_schema(function["arguments"])
        functions.append({**function, "arguments": arguments})
        all_reasons += [f"{function['name']}: {reason}" for reason in reasons]
    if functions == value["functions"]:
        return grammar, []
    return Grammar("calls", json.dumps({**value, "functions": functions})), all_reasons


def relax_grammar_if_needed(grammar: Grammar, field: str) -> tuple[Grammar, list[str]]:
    """Return a grammar that compiles: the same, or a weaker one and what it does not enforce.

    Args:
        grammar: to check.
        field: of the request, in front of errors and reasons.

    Raises:
        RequestError: there is none; it says what is wrong with the grammar itself.
    """
    try:
        check_grammar(grammar)
    except RequestError as error:
        first_error = f"{field}: {str(error).removeprefix(f'{field}: ')}"
    else:
        return grammar, []
    coerced, reasons = relax_grammar(grammar)
    try:
        if coerced is grammar:
            raise RequestError(first_error)
        check_grammar(coerced)
    except RequestError:
        raise RequestError(first_error) from None
    return coerced, [f"{field}: {reason}" for reason in reasons]


def relax_schema(schema: Any) -> tuple[Any, list[str]]:
    """Weaken a schema: the result, and a reason for each change."""
    relaxer = _SchemaRelaxer(schema)
    return relaxer.relax(schema), list(relaxer.reasons)


def _limit_unique_items(schema: dict[str, Any]) -> None:
    """Of unique items there are at most as many as values: without it, a list might not end."""
    items = schema.get("items")
    values = items.get("enum") if isinstance(items, Mapping) else None
    if isinstance(values, list):
        most = schema.get("maxItems")
        schema["maxItems"] = min(most, len(values)) if type(most) is int else len(values)


class _SchemaRelaxer:
    """Weakens one schema.

    Attributes:
        reasons: what was not enforced, in order.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self.reasons: dict[str, None] = {}

    def relax(self, schema: Any) -> Any:
        """Weaken a part of the schema."""
        if isinstance(schema, list):
            return [self.relax(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if self._is_unenforceable(key, value, schema):
                continue
            if key in _NAMED_SCHEMA_KEYS and isinstance(value, Mapping):
                out[key] = {name: self.relax(each) for name, each in value.items()}
            else:
                out[key] = value if key in _VALUE_KEYS else self.relax(value)
        if schema.get("uniqueItems") is True:
            _limit_unique_items(out)
        if "propertyNames" in out:
            self._relax_property_names(out)
        if "oneOf" in out:
            self._relax_one_of(out)
        return out

    def _is_unenforceable(self, key: str, value: Any, schema: Mapping[str, Any]) -> bool:
        """Whether a key is not enforced; records the reason."""
        if key in UNENFORCED_KEYWORDS:
            if value is not False:
                self._record_reason(f"{key} is not enforced")
            return True
        if key == "format" and isinstance(value, str) and value not in ENFORCED_FORMATS:
            if schema.get("type") in _NUMBER_TYPES:
                return False
            self._record_reason(f"format {quote(value, 40)} is not enforced")
            return True
        if key == "pattern" and isinstance(value, str) and _UNSUPPORTED_PATTERN.search(value):
            self._record_reason(
                f"pattern {quote(value, 60)} is not enforced: it looks around or back"
            )
            return True
        return False

    def _relax_property_names(self, out: dict[str, Any]) -> None:
        """propertyNames, of an object that lists no properties: the keys of pydantic's dict."""
        original = out.pop("propertyNames")
        names = self._resolve_ref(original)
        value = out.get("additionalProperties", {})
        listed = names.get("enum", [names["const"]] if "const" in names else None)
        pattern = names.get("pattern")
        open_object = not (out.keys() & {"properties", "patternProperties"})
        if open_object and isinstance(listed, list) and all(isinstance(k, str) for k in listed):
            out |= {"properties": dict.fromkeys(listed, value), "additionalProperties": False}
        elif open_object and isinstance(pattern, str) and not _UNSUPPORTED_PATTERN.search(pattern):
            out |= {"patternProperties": {pattern: value}, "additionalProperties": False}
        elif names or original is False:
            self._record_reason("propertyNames is not enforced")
            return
        ignored = (
            names.keys()
            - _PROPERTY_NAME_KEYS
            - ({"pattern"} if listed is None else {"enum", "const"})
        )
        if ignored:
            self._record_reason(f"{min(ignored)} of propertyNames is not enforced")

    def _relax_one_of(self, out: dict[str, Any]) -> None:
        self._record_reason("oneOf is enforced as anyOf: an answer may fit several alternatives")
        alternatives = {"anyOf": out.pop("oneOf")}
        if "anyOf" in out:
            out["allOf"] = [*out.get("allOf", []), alternatives]
        else:
            out |= alternatives

    def _resolve_ref(self, schema: Any) -> Mapping[str, Any]:
        """What a reference to a definition of the schema means; {} for another one."""
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema if isinstance(schema, Mapping) else {}
        target: Any = self._root
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        is_plain = isinstance(target, Mapping) and "$ref" not in target
        return target if is_plain else {"$ref": schema["$ref"]}

    def _record_reason(self, reason: str) -> None:
        self.reasons[reason] = None
