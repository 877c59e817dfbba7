"""Names that families had in older files, before transformers had their classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEGACY_MODEL_TYPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "RefinedWebModel": ("falcon", {}),
    "RefinedWeb": ("falcon", {"new_decoder_architecture": True}),  # Falcon 40B
}
"""Old ``model_type`` → today's, and keys with values that the old one implied."""


def with_current_model_type(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json under today's name of its family.

    Args:
        config: The config; without an old name it is returned as it is.
    """
    old = str(config.get("model_type"))
    if old not in LEGACY_MODEL_TYPES:
        return dict(config)
    current, implied = LEGACY_MODEL_TYPES[old]
    return {**implied, **config, "model_type": current}
