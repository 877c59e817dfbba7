"""Types of the callbacks to which long functions report their progress."""

from __future__ import annotations

from collections.abc import Callable

StageProgress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""
AmountProgress = Callable[[int, int], None]
"""Called with (done, total)."""
