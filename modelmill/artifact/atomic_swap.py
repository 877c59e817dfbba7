"""Two folders change places in one step, where the system can do that."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)


def atomic_swap(first: Path, second: Path) -> bool:
    """Whether the two now have each other's names; nothing moves where the system or its disk
    format cannot.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return (
        int(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE))
        == 0
    )
