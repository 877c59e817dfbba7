"""Logging: one logger tree, silent by default; prompts and keys are never logged."""

from __future__ import annotations

import logging


def get_logger(name: str) -> logging.Logger:
    """Return a logger below ``modelmill``."""
    return logging.getLogger(name if name.startswith("modelmill") else f"modelmill.{name}")
