"""Proves that no value fits two alternatives of ``oneOf``, where that is simple to see.

Then ``anyOf`` means the same. Alternatives have other types, or are objects that a discriminator
tells apart: a required property with other values in each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
MAX_PAIRS = 2048
"""Maximum pairs that are compared."""


def are_alternatives_disjoint(
    alternatives: Sequence[Any], resolve_ref: Callable[[Any], Schema]
) -> bool:
    """Whether no value fits two of the alternatives; False if that cannot be seen.

    Args:
        alternatives: of ``oneOf``.
        resolve_ref: returns a schema, or the definition that it refers to.
    """
    pairs = itertools.combinations(map(resolve_ref, alternatives), 2)
    first_pairs = list(itertools.islice(pairs, MAX_PAIRS + 1))
    return len(first_pairs) <= MAX_PAIRS and all(
        _are_disjoint(one, other, resolve_ref) for one, other in first_pairs
    )


def _are_disjoint(one: Schema, other: Schema, resolve_ref: Callable[[Any], Schema]) -> bool:
    if _have_disjoint_enum_values(one, other):
        return True
    types = _declared_types(one), _declared_types(other)
    if all(types) and not types[0] & types[1]:
        return True
    if types != ({"object"}, {"object"}):
        return False
    return any(
        _have_disjoint_enum_values(
            resolve_ref(_properties(one).get(name)), resolve_ref(_properties(other).get(name))
        )
        for name in _required_names(one) & _required_names(other)
    )


def _have_disjoint_enum_values(one: Schema, other: Schema) -> bool:
    here, there = _allowed_values(one), _allowed_values(other)
    return here is not None and there is not None and not here & there


def _allowed_values(schema: Schema) -> set[tuple[type, Any]] | None:
    """The values of an enum or const; None if other ones fit, or they are not simple."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    # 1.0 is 1 in JSON, and lists and objects may be equal in other ways
    if not isinstance(values, list) or not all(
        each is None or type(each) in (str, bool, int) for each in values
    ):
        return None
    return {(type(each), each) for each in values}


def _declared_types(schema: Schema) -> set[str]:
    declared = schema.get("type")
    names = {each for each in _list_or_empty(declared) or [declared] if isinstance(each, str)}
    return names | {"integer"} if "number" in names else names


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _required_names(schema: Schema) -> set[str]:
    return {name for name in _list_or_empty(schema.get("required")) if isinstance(name, str)}


def _list_or_empty(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
