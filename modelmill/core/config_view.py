"""A foreign config that remembers which of its keys were read, so that none is ignored in
silence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any


class ConfigView(Mapping[str, Any]):
    """The values of a config.json; every look-up of a key counts as reading it.

    remarks: what those who read it have to say of its values, for the build's report. Walking over
    the view (``dict(view)``, ``{**view}``) reads every key: take ``overlay`` to put defaults below
    or values above.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = dict(values)
        self._prefix = prefix
        self._overridden: frozenset[str] = frozenset()
        self._read: set[str] = set()
        self._ignored: dict[str, Any] = {}
        self._sub_views: list[ConfigView] = []
        self.remarks: list[str] = []

    def __getitem__(self, key: str) -> Any:
        if key not in self._overridden:
            self._read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def overlay(self, defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> ConfigView:
        """The same config over defaults and under values that win; what ``overrides`` hides is not
        read by reading that."""
        view = copy.copy(self)  # what was read is shared
        view._values = {**defaults, **self._values, **overrides}
        view._overridden = self._overridden | overrides.keys()
        return view

    def sub_view(self, values: Mapping[str, Any], prefix: str = "") -> ConfigView:
        """A view of an object within the config; prefix: what makes its keys' full names
        ("vision_config.").
        """
        found = ConfigView(values, self._prefix + prefix)
        found.remarks = self.remarks
        self._sub_views.append(found)
        return found

    def ignore(self, values: Mapping[str, Any]) -> None:
        """Say that nobody reads these: values, by their full names, of an object that was read."""
        self._ignored.update(values)

    def unread(self) -> dict[str, Any]:
        """Every key with a value that nobody read, parts included."""
        own = {
            key: value for key, value in self._values.items() if key not in self._read
        } | self._ignored
        found = {f"{self._prefix}{key}": value for key, value in own.items() if value is not None}
        for part in self._sub_views:
            found |= part.unread()
        return found


def overlay_config(
    raw: Mapping[str, Any], defaults: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """A config over defaults and under values that win; a view keeps track, whoever reads it."""
    if isinstance(raw, ConfigView):
        return raw.overlay(defaults, overrides or {})
    return {**defaults, **raw, **(overrides or {})}
