"""Values written as nested tags: their types come from the tool's JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelmill.text.parameter_types import (
    MAX_SCHEMA_PARTS,
    NON_STRING_JSON_TYPES,
    argument_text_to_json,
    make_parameter_type,
    resolve_pointer,
    schema_types,
)

Schema = Mapping[str, Any]
LIST_ITEM_TAG = "item"
"""Tag of an element of a list."""
_ZERO_PADDED_INTEGER = re.compile(r"(-?)0+([0-9]+)")
_EMPTY_JSON_BY_TYPE = {"array": "[]", "object": "{}"}


@dataclass
class TagNode:
    """An open tag.

    Attributes:
        tag: its name.
        schema: of its value; None if the tool does not declare it.
        texts: pieces of the text directly inside.
        children: name and JSON of each tag inside.
    """

    tag: str
    schema: Schema | None
    texts: list[str] = field(default_factory=list)
    children: list[tuple[str, str]] = field(default_factory=list)

    def make_child_node(self, tag: str, root: Schema) -> TagNode:
        """Return the node of a tag that opens inside.

        Args:
            tag: its name.
            root: schema of all arguments, for references.
        """
        return TagNode(tag, child_schema(self.schema, tag, len(self.children), root))

    def to_json(self, root: Schema) -> str:
        """Return the JSON of the value; text beside tags is none of it.

        Args:
            root: schema of all arguments, for references.
        """
        if not self.children:
            return _leaf_text_to_json("".join(self.texts), self.schema, root)
        if self._is_json_list(root):
            return f"[{', '.join(value for _, value in self.children)}]"
        members: dict[str, list[str]] = {}
        for tag, value in self.children:
            members.setdefault(tag, []).append(value)
        pairs = (
            f"{json.dumps(tag, ensure_ascii=False)}: "
            + (values[0] if len(values) == 1 else f"[{', '.join(values)}]")
            for tag, values in members.items()
        )
        return f"{{{', '.join(pairs)}}}"

    def _is_json_list(self, root: Schema) -> bool:
        types = NON_STRING_JSON_TYPES if self.schema is None else schema_types(self.schema, root)
        if ("array" in types) != ("object" in types):
            return "array" in types
        return all(tag == LIST_ITEM_TAG for tag, _ in self.children)


def child_schema(
    schema: Any, tag: str, index: int, root: Schema, memo: dict[int, Schema | None] | None = None
) -> Schema | None:
    """Return the schema of a member or an element; None if it is not declared.

    Args:
        schema: of the object or the list.
        tag: name of the member.
        index: of the element.
        root: schema of all arguments, for references.
        memo: of the schemas that were read already, by identity: none is read twice.
    """
    memo = {} if memo is None else memo
    if not isinstance(schema, Mapping) or len(memo) > MAX_SCHEMA_PARTS // 2:  # three frames each
        return None
    if id(schema) not in memo:
        memo[id(schema)] = None  # a schema that refers to itself adds nothing
        memo[id(schema)] = _read_child_schema(schema, tag, index, root, memo)
    return memo[id(schema)]


def _read_child_schema(
    schema: Schema, tag: str, index: int, root: Schema, memo: dict[int, Schema | None]
) -> Schema | None:
    if "$ref" in schema:
        target = resolve_pointer(schema["$ref"], root)
        return child_schema(target, tag, index, root, memo)
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and isinstance(properties.get(tag), Mapping):
        return dict(properties[tag])
    first = schema.get("prefixItems")
    if isinstance(first, list) and index < len(first) and isinstance(first[index], Mapping):
        return dict(first[index])
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        members = parts if isinstance(parts, list) else ()
        schemas = [child_schema(each, tag, index, root, memo) for each in members]
        declared = [each for each in schemas if each is not None]
        if declared:
            return declared[0] if len(declared) == 1 else {key: declared}
    key = "items" if "array" in schema_types(schema, root) and tag == LIST_ITEM_TAG else ""
    rest = schema.get(key, schema.get("additionalProperties", schema.get("items")))
    return dict(rest) if isinstance(rest, Mapping) else None


def _leaf_text_to_json(text: str, schema: Schema | None, root: Schema) -> str:
    """The JSON of a value without tags inside."""
    types = {"string"} if schema is None else schema_types(schema, root)
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    if not text.strip() and "string" not in types:
        empty = next(
            (_EMPTY_JSON_BY_TYPE[each] for each in _EMPTY_JSON_BY_TYPE if each in types), None
        )
        if empty is not None:
            return empty
    padded = _ZERO_PADDED_INTEGER.fullmatch(text.strip())
    if padded and "integer" in types and "string" not in types:
        text = padded[1] + padded[2]
    return argument_text_to_json(text, make_parameter_type(types))
