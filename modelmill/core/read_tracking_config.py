"""A config.json that records which of its keys were read, so that none is ignored silently."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

RawConfig = Mapping[str, Any]
"""A config.json, or a view of it."""


class ReadTrackingConfig(Mapping[str, Any]):
    """The values of a config.json; each lookup of a key marks it as read.

    Iterating over the view (``dict(view)``, ``{**view}``) reads every key: use
    ``with_config_defaults`` or ``with_config_overrides`` to add values.

    Attributes:
        remarks: notes on its values from the code that reads them, for the build report.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = dict(values)
        self._prefix = prefix
        self._overridden: frozenset[str] = frozenset()
        self._read: set[str] = set()
        self._ignored: dict[str, Any] = {}
        self._sub_views: list[ReadTrackingConfig] = []
        self.remarks: list[str] = []

    def __getitem__(self, key: str) -> Any:
        if key not in self._overridden:
            self._read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def with_defaults(
        self, defaults: Mapping[str, Any], *, overrides: Mapping[str, Any]
    ) -> ReadTrackingConfig:
        """Return this config with defaults for missing keys and overrides that take precedence.

        Reading a key of ``overrides`` does not mark the config's own key as read.
        """
        view = copy.copy(self)  # what was read is shared
        view._values = {**defaults, **self._values, **overrides}
        view._overridden = self._overridden | overrides.keys()
        return view

    def sub_view(self, values: Mapping[str, Any], prefix: str = "") -> ReadTrackingConfig:
        """Return a view of an object within the config.

        Args:
            values: the object.
            prefix: prefix of its keys' full names ("vision_config.").
        """
        view = ReadTrackingConfig(values, self._prefix + prefix)
        view.remarks = self.remarks
        self._sub_views.append(view)
        return view

    def mark_unread(self, values: Mapping[str, Any]) -> None:
        """Count these values as unread: by full name, values of an object that was read."""
        self._ignored.update(values)

    def unread(self) -> dict[str, Any]:
        """Return every key with a value that was not read, sub-views included."""
        own = {
            key: value for key, value in self._values.items() if key not in self._read
        } | self._ignored
        result = {f"{self._prefix}{key}": value for key, value in own.items() if value is not None}
        for view in self._sub_views:
            result |= view.unread()
        return result


def with_config_defaults(
    raw: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Apply defaults and overrides to a config; a ReadTrackingConfig still records what is read."""
    if isinstance(raw, ReadTrackingConfig):
        return raw.with_defaults(defaults, overrides=overrides or {})
    return {**defaults, **raw, **(overrides or {})}


def with_config_overrides(
    raw: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Apply overrides to a config; a ReadTrackingConfig still records what is read."""
    return with_config_defaults(raw, {}, overrides=overrides)
