"""What readers of calls ask of the tools' schemas, read once for each answer.

An answer may repeat a name a thousand times, and a schema may have thousands of branches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from modelmill.text.declared_arguments import (
    can_call_with_argument_names,
    declared_arguments,
    has_required_arguments,
    takes_undeclared_arguments,
)
from modelmill.text.parameter_types import (
    ParameterType,
    is_declared_string,
    resolve_parameter_type,
)

MAX_ARGUMENT_DEPTH = 64
"""Keys and elements inside one another; what is deeper counts as undeclared."""
Value = TypeVar("Value")


class ToolSchemaCache:
    """Reads the schemas of tools.

    Args:
        tools: schemas of the parameters by name.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any] | None]) -> None:
        self._tools = tools
        self._values: dict[Hashable, object] = {}

    def declared_arguments(self, name: str) -> frozenset[str] | None:
        """The names of a tool's arguments; None if it does not say."""
        return self._remember(("names", name), lambda: declared_arguments(self._tools.get(name)))

    def takes_undeclared_arguments(self, name: str) -> bool:
        """Whether a tool says that other arguments may come."""
        return self._remember(
            ("others", name), lambda: takes_undeclared_arguments(self._tools.get(name))
        )

    def has_required_arguments(self, name: str, keys: frozenset[str]) -> bool:
        """Whether none of the arguments that a tool requires is missing."""
        return self._remember(
            ("required", name, keys), lambda: has_required_arguments(self._tools.get(name), keys)
        )

    def can_call_with_argument_names(self, name: str, keys: frozenset[str]) -> bool:
        """Whether a tool declares all these arguments, and requires no other ones."""
        return self._remember(
            ("call", name, keys), lambda: can_call_with_argument_names(self._tools.get(name), keys)
        )

    def parameter_type(
        self, name: str, key: str, undeclared: str, attribute: bool | None
    ) -> ParameterType:
        """The type of a tool's argument, as ``resolve_parameter_type`` returns it."""
        if not self._may_be_declared(name, key):
            return resolve_parameter_type(None, key, undeclared, attribute)
        return self._remember(
            ("type", name, key, undeclared, attribute),
            lambda: resolve_parameter_type(self._tools.get(name), key, undeclared, attribute),
        )

    def is_declared_string(self, name: str, path: tuple[str, ...]) -> bool:
        """Whether a tool declares the value at a path of keys as a string, or as that or null."""
        if not path or len(path) > MAX_ARGUMENT_DEPTH or not self._may_be_declared(name, path[0]):
            return False
        return self._remember(
            ("string", name, path),
            lambda: is_declared_string(self._tools.get(name), path[0], path[1:]),
        )

    def _may_be_declared(self, name: str, key: str) -> bool:
        """Whether a schema of an argument is worth a search through all branches."""
        names = self.declared_arguments(name)
        return (names is not None and key in names) or self.takes_undeclared_arguments(name)

    def _remember(self, key: Hashable, read: Callable[[], Value]) -> Value:
        if key not in self._values:
            self._values[key] = read()
        return self._values[key]  # type: ignore[return-value]
