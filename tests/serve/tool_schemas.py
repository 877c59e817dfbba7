"""Functions that a model may call, as requests describe them."""

from __future__ import annotations

from typing import Any


def tool_without_arguments(name: str) -> dict[str, Any]:
    """A function that takes nothing."""
    parameters = {
        "type": "object", "properties": {}, "required": [], "additionalProperties": False
    }  # fmt: skip
    return {"name": name, "parameters": parameters}
