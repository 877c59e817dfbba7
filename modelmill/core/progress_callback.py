"""The callback to which a long function reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); ``done`` and ``total`` in the stage's unit: bytes or items."""
