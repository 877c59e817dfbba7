"""What a test waits for, and how long.

Bounds in seconds are there to tell "soon" from "hours" and "never", not to measure: a machine whose neighbours
take it away for half a minute must not fail what is right. So every bound is one that only a fault reaches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 90.0
"""Seconds; what takes so long is taken for stuck."""


@contextmanager
def soon(seconds: float = PATIENCE) -> Iterator[None]:
    """Its body ends soon."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.1f} s"


def until(true: Callable[[], object], seconds: float = PATIENCE, pause: float = 0.02) -> None:
    """Wait until it is true; AssertionError if it does not become so."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it does not come about in {seconds:g} s"
        time.sleep(pause)
