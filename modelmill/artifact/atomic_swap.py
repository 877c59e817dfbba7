"""Swaps two folders in one step, where the OS supports it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)


def atomic_swap(first: Path, second: Path) -> bool:
    """Exchange the names of two folders.

    Returns:
        False if the OS or the file system does not support it.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return (
        int(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE))
        == 0
    )
