"""Constraints on arguments that are written as nested tags.

Declared objects and lists of one type are written as tags. Other values (alternatives, free
objects) are written as text: a string, or JSON, which the parser takes for declared types, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from modelmill.core.errors import RequestError
from modelmill.text.argument_grammar import ArgumentGrammar, schema_properties
from modelmill.text.parameter_types import (
    argument_text_to_json,
    make_parameter_type,
    schema_types,
)
from modelmill.text.tag_values import LIST_ITEM_TAG

Schema = Mapping[str, Any]
_COMMENTS = {"title", "description", "default", "examples", "$schema", "$defs", "definitions"}
_OBJECT_KEYS = {*_COMMENTS, "type", "properties", "required", "additionalProperties"}
_LIST_KEYS = {*_COMMENTS, "type", "items", "minItems", "maxItems"}


class NestedTagGrammar(ArgumentGrammar):
    """Writes the arguments of one function as tags."""

    def nested_tags_expr(self) -> str:
        """All arguments, in the order of their declaration.

        Raises:
            RequestError: if the name of a required argument cannot be a tag.
        """
        return self._tagged_properties_expr(self._top)

    def _tagged_properties_expr(self, schema: Schema) -> str:
        parts = []
        for key, value, required in schema_properties(schema):
            if is_tag_name(key):
                part = self._tagged_value_expr(key, value)
                parts.append(part if required else f"({part})?")
            elif required:
                raise RequestError(
                    f"tools: {self._name} needs the property {key!r}, which this model cannot "
                    "write as a tag; use a name without < and >, which does not begin with /"
                )
        return " ".join(parts)

    def _tagged_value_expr(self, tag: str, schema: Schema) -> str:
        """A value between its tags."""
        mark = self._calls.tag_prefix
        close = f"{mark}</{tag}>"
        opened = self._builder.literal(f"{mark}<{tag}>")
        return f"{opened} {self._value_and_close_tag_expr(schema, close)}"

    def _value_and_close_tag_expr(self, schema: Schema, close: str) -> str:
        """A value and its closing tag."""
        if "$ref" in schema:
            return self._reference_rule(str(schema["$ref"]), close)
        builder = self._builder
        types = schema_types(schema, self._root)
        if types == {"object"} and self._is_expressible_as_member_tags(schema):
            return f"{self._tagged_properties_expr(schema)} {builder.literal(close)}"
        if types == {"array"} and schema.keys() <= _LIST_KEYS:
            items = schema.get("items")
            item = self._tagged_value_expr(
                LIST_ITEM_TAG, items if isinstance(items, Mapping) else {}
            )
            low, high = int(schema.get("minItems", 0)), schema.get("maxItems", "")
            return f"({builder.add_rule(item)}){{{low},{high}}} {builder.literal(close)}"
        if "enum" in schema or "const" in schema:
            return self._enum_values_expr(schema, types, close)
        string, other = self._string_and_json_expr_makers(schema)
        forms = [form(close) for form in (string, other) if form is not None]
        return f"({' | '.join(forms)})"

    def _is_expressible_as_member_tags(self, schema: Schema) -> bool:
        """Whether tags for the declared members are all that an object needs."""
        closed = "properties" in schema or schema.get("additionalProperties") is False
        names = [key for key, _, required in schema_properties(schema) if required]
        return closed and schema.keys() <= _OBJECT_KEYS and all(map(is_tag_name, names))

    def _enum_values_expr(self, schema: Schema, types: set[str], close: str) -> str:
        """Values of a list, those that come back as they are."""
        values = schema.get("enum", [schema.get("const")])
        parsed = make_parameter_type(types)
        texts = []
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            read = json.dumps(text) if parsed.is_string else argument_text_to_json(text, parsed)
            if json.loads(read) == value:
                texts.append(f"{self._builder.literal(text)} {self._builder.literal(close)}")
        if not texts:
            self._raise_inexpressible(
                "an enum of strings that read as other types", "in a property"
            )
        return f"({' | '.join(texts)})"

    def _reference_rule(self, reference: str, close: str) -> str:
        key = f"{reference} {close}"
        if key not in self._rules:
            self._rules[key] = self._builder.new_symbol_name("d")
            target = self._resolve_refs({"$ref": reference})
            self._builder.define(self._rules[key], self._value_and_close_tag_expr(target, close))
        return self._rules[key]


def is_tag_name(key: str) -> bool:
    """Whether the name of an argument can be a tag."""
    return bool(key) and key[0] != "/" and not {"<", ">"} & set(key)
