"""Waiting in tests, with timeouts.

Timeouts distinguish "soon" from "never" and measure nothing: a busy machine must not fail a correct
test. So only a fault reaches a timeout. It is shorter than the minute after which the server itself
gives up by default, which would hide the fault.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TIMEOUT_SECONDS = 50.0
"""Seconds after which something counts as stuck."""


@contextmanager
def time_limit(seconds: float = TIMEOUT_SECONDS) -> Iterator[None]:
    """Assert that the block takes less than ``seconds``."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < seconds, f"took {took:.1f} s"


def wait_until(
    condition: Callable[[], object],
    seconds: float = TIMEOUT_SECONDS,
    pause: float = 0.02,
    describe: Callable[[], object] | None = None,
) -> None:
    """Wait until ``condition``; raise AssertionError with what ``describe`` returns if it fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(
                f"the condition did not hold within {seconds:g} s", describe() if describe else None
            )
        time.sleep(pause)


@contextmanager
def ended_if_hung(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after ``seconds``; torch has as many threads as before."""

    import torch

    def fail(*_: object) -> None:
        raise TimeoutError("hung")

    before, threads = signal.signal(signal.SIGALRM, fail), torch.get_num_threads()
    signal.alarm(seconds)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
