"""A config.json read by its family, and what a build says of it; no weights are needed."""

from __future__ import annotations

from typing import Any

from modelmill.builder.model_config import reject_or_warn_unread_keys
from modelmill.core.module_lookup import import_module_if_exists
from modelmill.core.read_tracking_config import ReadTrackingConfig


def read_config(raw: dict[str, Any]) -> tuple[Any, list[str]]:
    """The sizes of a model, and what is said of the keys that its family does not read."""
    family = import_module_if_exists("modelmill.models", raw["model_type"])
    assert family is not None
    view = ReadTrackingConfig(raw)
    sizes = family.config_from_hf(view)
    return sizes, reject_or_warn_unread_keys(view, family, "config.json", sizes)


def config_warnings(raw: dict[str, Any]) -> list[str]:
    """What a build says of a config, or CheckpointError."""
    return read_config(raw)[1]
