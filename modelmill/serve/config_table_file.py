"""Configuration files of the server: a list of tables in TOML or JSON."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from modelmill.core.errors import UsageError
from modelmill.core.quoting import quote


def read_config_tables(flag: str, file: Path, name: str) -> list[Any]:
    """Read a file whose only entry is a list.

    Args:
        flag: that names the file, for messages.
        file: TOML by its suffix, else JSON.
        name: of the list.

    Returns:
        The list's elements, unchecked; at least one.

    Raises:
        UsageError: it cannot be read, or has another form; no message quotes the file.
    """
    try:
        text = file.read_text("utf-8")
        raw = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"{flag} {file} cannot be read") from None
    except (ValueError, RecursionError):
        kind = "TOML" if file.suffix == ".toml" else "JSON"
        raise UsageError(f"{flag} {file} is not valid {kind}") from None
    tables = raw.get(name) if isinstance(raw, Mapping) else None
    if not isinstance(tables, list) or not tables or set(raw) != {name}:
        raise UsageError(f"{flag} {file} must have a list {name}, and nothing else")
    return tables


def check_table(where: str, raw: Any, keys: Iterable[str]) -> Mapping[str, Any]:
    """An element of the list, if it is a table with no other keys than these.

    Args:
        where: the element stands, for messages.
        raw: the element.
        keys: that it may have.

    Returns:
        raw.

    Raises:
        UsageError: it is no table, or has an unknown key.
    """
    if not isinstance(raw, Mapping):
        raise UsageError(f"{where} must be a table")
    unknown = sorted(set(raw) - set(keys))
    if unknown:
        raise UsageError(
            f"{where}: unknown key {quote(unknown[0], 60)}; known are {', '.join(sorted(keys))}"
        )
    return raw
