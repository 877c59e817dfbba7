"""Constraints on arguments in the syntaxes that do not write them as one JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.text.answer_renderer import (
    escape_attribute,
    json_to_gemma_syntax,
    json_to_python_literal,
)
from modelmill.text.chat_syntax import CallSyntax, ParameterSyntax
from modelmill.text.lark_builder import LarkBuilder, regex_literal
from modelmill.text.parameter_types import (
    MAX_REF_CHAIN_LENGTH,
    NON_STRING_JSON_TYPES,
    resolve_pointer,
    schema_types,
)

Schema = Mapping[str, Any]
# texts that a parser would read as JSON: no strings where other types are allowed
_NON_JSON_TEXT = r"~/(?s:\s*(true|false|null|True|False|None|-?[0-9][-+.0-9eE]*|[\[{\"'].*)\s*)/"
_NON_STRING_TYPE_NAMES_EXPR = '"number" | "boolean" | "null" | "object" | "array"'
_UNSUPPORTED_TOP_LEVEL_KEYS = (
    *("anyOf", "oneOf", "allOf", "if", "not", "const", "enum"),
    *("patternProperties", "minProperties", "maxProperties", "propertyNames"),
)
_STRING_CONSTRAINT_KEYS = {"pattern", "minLength", "maxLength", "enum", "const"}


class ArgumentGrammar:
    """Writes the arguments of one function as expressions of a Lark grammar."""

    def __init__(self, builder: LarkBuilder, calls: CallSyntax, name: str, schema: Schema) -> None:
        """Prepare a function.

        Args:
            builder: of the grammar.
            calls: how arguments are written.
            name: of the function, for messages.
            schema: of its arguments.

        Raises:
            RequestError: if the syntax cannot express the schema.
        """
        self._builder, self._calls, self._root = builder, calls, schema
        self._name = name
        self._rules: dict[str, str] = {}
        self._top = self._resolve_refs(schema)
        for key in _UNSUPPORTED_TOP_LEVEL_KEYS:
            if key in self._top:
                self._raise_inexpressible(key)
        if "object" not in schema_types(self._top, schema):
            self._raise_inexpressible("a type other than object")
        declared = self._top.get("properties") or {}
        lost = [name for name in self._top.get("required") or () if name not in declared]
        if lost and self._top.get("additionalProperties") is False:
            raise RequestError(
                f"tools: the parameters of {name} require {lost[0]!r}, which they do not allow"
            )

    def _resolve_refs(self, schema: Schema) -> Schema:
        """Follow references."""
        for _ in range(MAX_REF_CHAIN_LENGTH):
            if "$ref" not in schema:
                return schema
            target = resolve_pointer(schema["$ref"], self._root)
            schema = target if isinstance(target, Mapping) else {"$ref": None}
        raise RequestError(
            f"tools: the parameters of {self._name} have a $ref that points to no schema"
        )

    def _raise_inexpressible(self, key: str, where: str = "at the top") -> Any:
        raise RequestError(
            f"tools: the parameters of {self._name} have {key} {where}, which this model's call "
            "syntax cannot express; declare plain properties instead"
        )

    def delimited_arguments_expr(self) -> str:
        """Arguments between marks of their own."""
        parameter = self._calls.parameter
        assert parameter is not None, "this style has marks of an argument"
        parts = []
        for key, schema, required in schema_properties(self._top):
            string, other = self._string_and_json_expr_makers(schema)
            opening = self._builder.literal(parameter.open + escape_attribute(self._calls, key))
            forms = []
            for is_string, form in ((True, string), (False, other)):
                if form is None:
                    continue
                head = self._type_attribute_expr(parameter, is_string)
                forms.append(f"{head} {form(parameter.close)}")
            part = f"{opening} ({' | '.join(forms)})"
            parts.append(part if required else f"({part})?")
        return " ".join(parts)

    def _type_attribute_expr(self, parameter: ParameterSyntax, is_string: bool) -> str:
        """What follows a key, with the mark after it."""
        before, after = parameter.type_open, parameter.key_end
        if parameter.type_attribute == "type":
            before, after = '" type="', f'"{after}'
        if before:
            names = '"string"' if is_string else _NON_STRING_TYPE_NAMES_EXPR
            return f"{self._builder.literal(before)} ({names}) {self._builder.literal(after)}"
        attribute = f'" string="{"true" if is_string else "false"}'
        return self._builder.literal(
            (attribute if parameter.type_attribute else "") + parameter.key_end
        )

    def keyword_arguments_expr(self) -> str:
        """Keyword arguments in Python's syntax."""

        def keyword(key: str, schema: Schema) -> str:
            types = schema_types(schema, self._root)
            if types <= {"boolean", "null"}:
                allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
                values = [True, False] * ("boolean" in types) + [None] * ("null" in types)
                texts = [
                    json_to_python_literal(json.dumps(value))
                    for value in values
                    if allowed is None or any(value is each for each in allowed)
                ]
                value = f"({' | '.join(map(json.dumps, texts))})"
            else:
                value = self._json_value_expr(schema)
            return f"{self._builder.literal(f'{key}=')} {value}"

        required = {name for name, _, needed in schema_properties(self._top) if needed}
        bad = sorted(name for name in required if not name.isidentifier())
        if bad:
            raise RequestError(
                f"tools: {self._name} needs the property {bad[0]!r}, which Python's call syntax of "
                "this model cannot express; use letters, digits and _"
            )
        members = [each for each in schema_properties(self._top) if each[0].isidentifier()]
        return self._separated_members_expr(members, ", ", keyword)

    def bare_key_object_expr(self) -> str:
        """An object with bare keys and marked strings (Gemma)."""
        return self._gemma_object_expr(self._top)

    # -- values between marks

    def _string_and_json_expr_makers(
        self, schema: Schema
    ) -> tuple[Callable[[str], str] | None, Callable[[str], str] | None]:
        """Expressions of a value and its closing mark: as a string, and as JSON."""
        types = schema_types(schema, self._root)
        strings = self._string_expr_maker(schema, types) if "string" in types else None
        others = types & NON_STRING_JSON_TYPES
        if not others:
            return strings, None
        value = self._json_value_expr(schema, sorted(others) if strings else None)
        return strings, lambda close: f"{value} {self._builder.literal(close)}"

    def _string_expr_maker(self, schema: Schema, types: set[str]) -> Callable[[str], str]:
        schema = self._resolve_refs(schema)
        allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        builder = self._builder
        if allowed is not None:
            texts = [text for text in allowed if isinstance(text, str)]
            literals = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
            return lambda close: f"({literals}) {builder.literal(close)}"
        terms = []
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        if low or high != "":
            terms.append(f"/(?s:.{{{low},{high}}})/")
        if self._calls.tag_prefix:
            terms.append(f"~/(?s:.*){regex_literal(self._calls.tag_prefix)}(?s:.*)/")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            terms.append(_pattern_to_terminal(pattern))
        for key in ("anyOf", "oneOf", "allOf"):
            if any(
                _STRING_CONSTRAINT_KEYS & each.keys()
                for each in schema.get(key, ())
                if each is not True
            ):
                self._raise_inexpressible_string(key)
        if len(types) > 1:
            terms.append(_NON_JSON_TEXT)
        empty = not low and (not isinstance(pattern, str) or _matches_empty_text(pattern))
        return lambda close: builder.text_and_end_mark(close, terms=terms, empty=empty)

    def _raise_inexpressible_string(self, key: str) -> None:
        raise RequestError(
            f"tools: {self._name} has a property of constrained strings in {key}, which this "
            "model's call syntax cannot express; write one schema"
        )

    def _json_value_expr(self, schema: Schema, types: Sequence[str] | None = None) -> str:
        """A value as JSON; types: only values of these types."""
        local = dict(schema)
        if "$ref" in json.dumps(schema):
            local = {
                **_rebase_refs_to_defs(schema),
                "$defs": {"root": _rebase_refs_to_defs(self._root)},
            }
        if types is None:
            return self._builder.add_json_schema(local)
        defs = {"$defs": local.pop("$defs")} if "$defs" in local else {}
        if "enum" in local:
            local["enum"] = [each for each in local["enum"] if not isinstance(each, str)]
            return self._builder.add_json_schema({**defs, **local})
        if set(local) <= {"type", "description", "title", "default"}:
            return self._builder.add_json_schema({"type": list(types)})
        return self._builder.add_json_schema({**defs, "allOf": [local, {"type": list(types)}]})

    # -- Gemma's values

    def _gemma_object_expr(self, schema: Schema) -> str:
        members = self._separated_members_expr(
            schema_properties(schema),
            ",",
            lambda key, value: (
                f"{self._builder.literal(f'{key}:')} {self._gemma_value_expr(value)}"
            ),
        )
        return f'"{{" {members} "}}"'

    def _gemma_value_expr(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            schema = {}
        if "$ref" in schema:
            return self._gemma_reference_rule(str(schema["$ref"]))
        mark = self._calls.string_mark
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            texts = (
                self._builder.literal(json_to_gemma_syntax(json.dumps(v), mark)) for v in values
            )
            return f"({' | '.join(texts)})"
        for key in ("anyOf", "oneOf"):
            if key in schema:
                if schema.keys() - {key, "title", "description", "default", "examples"}:
                    self._raise_inexpressible(key, "beside other keys")
                return f"({' | '.join(self._gemma_value_expr(each) for each in schema[key])})"
        if "allOf" in schema:
            self._raise_inexpressible("allOf", "in a property")
        declared = schema.get("type", ["string", "number", "boolean", "null"])
        types = declared if isinstance(declared, list) else [declared]
        return f"({' | '.join(self._gemma_typed_value_expr(each, schema) for each in types)})"

    def _gemma_typed_value_expr(self, value_type: str, schema: Schema) -> str:
        if value_type == "string":
            string = self._string_expr_maker({**schema, "type": "string"}, {"string"})
            mark = self._calls.string_mark
            return f"{self._builder.literal(mark)} {string(mark)}"
        if value_type == "object":
            return self._gemma_object_expr(schema)
        if value_type == "array":
            item = self._gemma_value_expr(schema.get("items"))
            low, high = int(schema.get("minItems", 0)), schema.get("maxItems", "")
            more = f'("," {item}){{{max(low - 1, 0)},{high - 1 if high != "" and high else high}}}'
            some = f"{item} {more}" if high != 0 else ""
            return f'"[" ({some}){"" if low else "?"} "]"' if some else '"[" "]"'
        return self._builder.add_json_schema({**schema, "type": value_type})

    def _gemma_reference_rule(self, reference: str) -> str:
        if reference not in self._rules:
            self._rules[reference] = self._builder.new_symbol_name("d")
            target = self._resolve_refs({"$ref": reference})
            self._builder.define(self._rules[reference], self._gemma_value_expr(target))
        return self._rules[reference]

    def _separated_members_expr(
        self,
        members: list[tuple[str, Schema, bool]],
        separator: str,
        write: Callable[[str, Schema], str],
    ) -> str:
        """Members in the order of their declaration; optional ones may be missing."""
        rest, head = "", ""
        comma = json.dumps(separator)
        for key, value, required in reversed(members):
            member = write(key, value)
            first = f"{member} {rest}"
            if required:
                head = first
                rest = f"{comma} {member} {rest}"
            else:
                head = f"({self._builder.add_rule(first)} | {head})" if head else f"({first})?"
                rest = f"({comma} {member})? {rest}"
            rest = self._builder.add_rule(rest)
        return head


def schema_properties(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """Return names, schemas and whether they are required."""
    properties = schema.get("properties")
    declared = dict(properties) if isinstance(properties, Mapping) else {}
    required = [name for name in schema.get("required") or () if isinstance(name, str)]
    for name in required:
        declared.setdefault(name, {})
    return [
        (name, value if isinstance(value, Mapping) else {}, name in required)
        for name, value in declared.items()
        if value is not False
    ]


def _pattern_to_terminal(pattern: str) -> str:
    """A JSON schema's pattern, which may match anywhere, as a terminal of the whole text."""
    start = "" if pattern.startswith("^") else "(?s:.*)"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    body = pattern.removeprefix("^").removesuffix("$" if not end else "")
    return f"/{start}({body.replace('/', chr(92) + '/')}){end}/"


def _matches_empty_text(pattern: str) -> bool:
    """Whether a pattern matches the empty text, as far as Python can tell."""
    try:
        return re.search(pattern, "") is not None
    except re.error:
        return False


def _rebase_refs_to_defs(schema: Any) -> Any:
    """A copy with all references moved to #/$defs/root."""
    if isinstance(schema, Mapping):
        return {
            key: "#/$defs/root" + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _rebase_refs_to_defs(value)
            for key, value in schema.items()
        }
    return [_rebase_refs_to_defs(each) for each in schema] if isinstance(schema, list) else schema
