"""Which arguments a tool declares and requires, in all parts of the schema of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from modelmill.text.parameter_types import MAX_SCHEMA_PARTS, alternative_parts, required_parts

Schema = Mapping[str, Any]


def declared_arguments(parameters: Schema | None) -> frozenset[str] | None:
    """Return the names of all arguments that a schema declares; None if it declares none at all."""
    members = [_members(each) for each in _schema_parts(parameters or {})]
    if all(each is None for each in members):
        return None
    return frozenset(name for each in members for name in each or ())


def takes_undeclared_arguments(parameters: Schema | None) -> bool:
    """Whether a schema says that other arguments may come; it does so with {}, too."""
    parts = _schema_parts(parameters or {})
    return any(each.get("additionalProperties", False) is not False for each in parts)


def can_call_with_argument_names(parameters: Schema | None, keys: Set[str]) -> bool:
    """Whether a tool declares all these arguments, and requires no other ones.

    Args:
        parameters: JSON schema of the tool's parameters.
        keys: names of the arguments.
    """
    names = _names_if_complete(parameters, keys, parameters or {}, {})
    return names is not None and keys <= names


def has_required_arguments(parameters: Schema | None, keys: Set[str]) -> bool:
    """Whether none of the arguments that a tool requires is missing.

    Args:
        parameters: JSON schema of the tool's parameters.
        keys: names of the arguments.
    """
    return _names_if_complete(parameters, keys, parameters or {}, {}) is not None


def _names_if_complete(
    schema: Any, keys: Set[str], root: Schema, memo: dict[int, frozenset[str] | None]
) -> frozenset[str] | None:
    """The arguments that a schema declares; None if it requires one that is not among the keys.

    Of alternatives those count whose required arguments are there.

    Args:
        schema: of an object.
        keys: names of the arguments.
        root: schema of all arguments, for references.
        memo: of the schemas that were read already, by identity: none is read twice.
    """
    if not isinstance(schema, Mapping) or len(memo) > MAX_SCHEMA_PARTS:
        return frozenset()
    if id(schema) in memo:
        return memo[id(schema)]
    memo[id(schema)] = frozenset()  # a schema that refers to itself adds nothing
    required = schema.get("required")
    listed = required if isinstance(required, list) else ()
    parts = [_names_if_complete(each, keys, root, memo) for each in required_parts(schema, root)]
    if not all(name in keys for name in listed if isinstance(name, str)):
        parts.append(None)
    for group in alternative_parts(schema):
        complete = [_names_if_complete(each, keys, root, memo) for each in group]
        fitting = [each for each in complete if each is not None]
        parts.append(frozenset().union(*fitting) if fitting or not group else None)
    names = frozenset(_members(schema) or ())
    memo[id(schema)] = None if None in parts else names.union(*filter(None, parts))
    return memo[id(schema)]


def _members(schema: Schema) -> Schema | None:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else None


def _schema_parts(root: Schema) -> Iterator[Schema]:
    """A schema, and those of its references and alternatives, each once."""
    pending: list[Any] = [root]
    done = set[int]()
    for schema in pending:  # which grows; in the order in which types are read
        if len(done) == MAX_SCHEMA_PARTS:
            return
        if isinstance(schema, Mapping) and id(schema) not in done:
            done.add(id(schema))
            yield schema
            pending += required_parts(schema, root)
            pending += [each for group in alternative_parts(schema) for each in group]
