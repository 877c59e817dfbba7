"""What a test waits for, and how long.

Bounds in seconds are there to tell "soon" from "never", not to measure: a machine whose neighbours
take it away for some seconds must not fail what is right. So every bound is one that only a fault
reaches, and lies below the minute after which the server itself gives up by default, which would
end what should have ended long before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TIMEOUT_SECONDS = 50.0
"""Seconds; what takes so long is taken for stuck."""


@contextmanager
def time_limit(seconds: float = TIMEOUT_SECONDS) -> Iterator[None]:
    """Its body ends soon."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.1f} s"


def wait_until(
    condition: Callable[[], object],
    seconds: float = TIMEOUT_SECONDS,
    pause: float = 0.02,
    describe: Callable[[], object] | None = None,
) -> None:
    """Wait until it is true; AssertionError with what ``told`` gives if it does not become so."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(
                f"it does not come about in {seconds:g} s", describe() if describe else None
            )
        time.sleep(pause)
