"""Schemas of tools' arguments, as tests of calls declare them."""

from __future__ import annotations

from typing import Any


def object_schema(**types: str | list[str]) -> dict[str, Any]:
    """The schema of an object with properties of these types."""
    return {"type": "object", "properties": {key: {"type": each} for key, each in types.items()}}
