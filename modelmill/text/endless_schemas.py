"""JSON schemas that no finite value fits: a reference that its own value requires.

The grammar library compiles ``{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}`` and a model
would write one object inside another until its limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from modelmill.text.parameter_types import resolve_pointer

Schema = Mapping[str, Any]


def find_endless_reference(root: Any) -> str | None:
    """Return the ``$ref`` of a part of a schema that no finite value fits, or None.

    A part that may be left out counts as well: a model that begins it could not end it. What
    cannot be decided, as a reference to elsewhere, is taken for finite.

    Args:
        root: the JSON schema. Its depth is not limited.
    """
    groups: dict[int, list[list[int]]] = {}
    schemas: dict[int, Schema] = {}
    pending = [root]
    while pending:
        schema = pending.pop()
        if not isinstance(schema, Mapping) or id(schema) in schemas:
            continue
        schemas[id(schema)] = schema
        required = list(_required_alternatives(schema, root))
        groups[id(schema)] = [[id(each) for each in group] for group in required]
        pending += [each for group in required for each in group]
        pending += _optional_parts(schema)
    finite = _nodes_with_finite_value(groups)
    endless = (each for node, each in schemas.items() if node not in finite and "$ref" in each)
    return next((str(each["$ref"]) for each in endless), None)


def _nodes_with_finite_value(groups: Mapping[int, list[list[int]]]) -> set[int]:
    """Return the nodes with a finite value: each of their groups has a finite alternative.

    Every edge is followed once.
    """
    open_groups = {node: len(needed) for node, needed in groups.items()}
    waiting: dict[int, list[tuple[int, int]]] = {}
    for node, needed in groups.items():
        for index, group in enumerate(needed):
            for alternative in group:
                waiting.setdefault(alternative, []).append((node, index))
    closed: set[tuple[int, int]] = set()
    finite = {node for node, count in open_groups.items() if count == 0}
    queue = deque(finite)
    while queue:
        for node, index in waiting.get(queue.popleft(), ()):
            if (node, index) in closed:
                continue
            closed.add((node, index))
            open_groups[node] -= 1
            if open_groups[node] == 0:
                finite.add(node)
                queue.append(node)
    return finite


def _required_alternatives(schema: Schema, root: Any) -> Iterator[list[Schema]]:
    """Yield groups of schemas; a value is finite if one of each group is."""
    groups: list[Any] = []
    if isinstance(schema.get("$ref"), str):
        groups.append([resolve_pointer(schema["$ref"] or "#", root)])
    for key in ("anyOf", "oneOf"):
        groups.append(schema.get(key))
    groups += [[each] for each in _list_or_empty(schema.get("allOf"))]
    if schema.get("type") == "object":
        groups += _required_properties(schema)
    if schema.get("type") == "array" and type(schema.get("minItems")) is int:
        first = _list_or_empty(schema.get("prefixItems"))
        groups += [[each] for each in first[: schema["minItems"]]]
        if schema["minItems"] > len(first):
            groups.append([schema.get("items")])
    for group in groups:
        # anything else than a schema, as true, has a finite value
        if group and isinstance(group, list) and all(isinstance(each, Mapping) for each in group):
            yield group


def _required_properties(schema: Schema) -> Iterator[list[Any]]:
    """Yield the schema of each required property; which pattern fits a name is not decided."""
    listed = schema.get("properties")
    properties = listed if isinstance(listed, Mapping) else {}
    others = None if "patternProperties" in schema else schema.get("additionalProperties")
    for name in _list_or_empty(schema.get("required")):
        if isinstance(name, str):
            yield [properties.get(name, others)]


def _optional_parts(schema: Schema) -> list[Any]:
    """Return the schemas of properties and items, required or not."""
    parts: list[Any] = []
    for key in ("properties", "patternProperties"):
        properties = schema.get(key)
        parts += properties.values() if isinstance(properties, Mapping) else []
    parts += [schema.get("items"), schema.get("additionalProperties")]
    return parts + _list_or_empty(schema.get("prefixItems"))


def _list_or_empty(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
