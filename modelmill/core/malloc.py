"""Sets glibc's malloc thresholds so that freed memory is reused for the next tensor.

Only in modelmill's own processes.
"""

from __future__ import annotations

import ctypes

from modelmill.core import env

MMAP_THRESHOLD = 64 << 20
"""Bytes from which malloc maps a separate block: all pages are new and are returned by free."""
TRIM_THRESHOLD = 256 << 20
"""Free bytes at the end of the heap from which malloc returns them to the system."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def set_malloc_thresholds() -> bool:
    """Make malloc reuse the memory of freed tensors; returns whether it does now.

    By default glibc maps new pages for each block of more than 32 MB and returns free memory at the
    end of the heap: a page fault for every 4 KiB written. Does nothing with another C library, or
    if the user has set malloc's variables.
    """
    libc = _load_glibc()
    if libc is None or env.has_user_malloc_thresholds():
        return False
    return bool(
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        and libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    )


def trim_heap() -> None:
    """Return free memory to the system, for a process that continues after memory-heavy work."""
    libc = _load_glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _load_glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
