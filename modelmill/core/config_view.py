"""A foreign config that remembers which of its keys were read, so that none is ignored in silence."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any


class ConfigView(Mapping[str, Any]):
    """The values of a config.json; every look-up of a key counts as reading it.

    remarks: what those who read it have to say of its values, for the build's report. Walking over the view
    (``dict(view)``, ``{**view}``) reads every key: take ``layered`` to put defaults below or values above.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = dict(values)
        self._prefix = prefix
        self._hidden: frozenset[str] = frozenset()
        self._read: set[str] = set()
        self._left: dict[str, Any] = {}
        self._parts: list[ConfigView] = []
        self.remarks: list[str] = []

    def __getitem__(self, key: str) -> Any:
        if key not in self._hidden:
            self._read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def layered(self, below: Mapping[str, Any], above: Mapping[str, Any]) -> ConfigView:
        """The same config over defaults and under values that win; what ``above`` hides is not read by reading that."""
        view = copy.copy(self)  # what was read is shared
        view._values = {**below, **self._values, **above}
        view._hidden = self._hidden | above.keys()
        return view

    def part(self, values: Mapping[str, Any], prefix: str = "") -> ConfigView:
        """A view of an object within the config; prefix: what makes its keys' full names ("vision_config.")."""
        found = ConfigView(values, self._prefix + prefix)
        found.remarks = self.remarks
        self._parts.append(found)
        return found

    def leave(self, values: Mapping[str, Any]) -> None:
        """Say that nobody reads these: values, by their full names, of an object that was read."""
        self._left.update(values)

    def unread(self) -> dict[str, Any]:
        """Every key with a value that nobody read, parts included."""
        own = {key: value for key, value in self._values.items() if key not in self._read} | self._left
        found = {f"{self._prefix}{key}": value for key, value in own.items() if value is not None}
        for part in self._parts:
            found |= part.unread()
        return found


def layered(
    raw: Mapping[str, Any], below: Mapping[str, Any], above: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """A config over defaults and under values that win; a view keeps track, whoever reads it."""
    if isinstance(raw, ConfigView):
        return raw.layered(below, above or {})
    return {**below, **raw, **(above or {})}
