"""How long a request blocks a server's event loop for others, and how much memory it takes."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.serve.asgi_client import Response
from tests.serve.service_thread import ServiceThread

MAX_BLOCKED_SECONDS = 0.05
"""Most seconds."""
MAX_MEMORY_FACTOR, MEMORY_SLACK_BYTES = 10, 8 << 20
"""Memory of a request: so many times its bytes; what allocators keep for themselves."""
MAX_TRIES = 5
"""On a busy machine the loop may wait for its turn; what a request does, it does every time."""


@dataclass
class RequestCost:
    """response: of the last try. blocked_seconds: of this process's CPU time between two turns of
    the loop, at most, in the best of the tries. memory_growth: bytes of memory beyond the request's
    own.
    """

    response: Response
    blocked_seconds: float
    memory_growth: int


def measure_request(
    running: ServiceThread, path: str, data: bytes, growth: int | None = MAX_MEMORY_FACTOR
) -> RequestCost:
    """Send a request while /health is polled.

    growth: None: memory does not count.
    """
    longest_hold = float("inf")
    for _ in range(MAX_TRIES):
        with _memory_growth() as grown:
            response, now = running.run(_post_and_measure(running, path, data))
        longest_hold = min(longest_hold, now)
        if longest_hold <= MAX_BLOCKED_SECONDS and (
            growth is None or grown[0] <= growth * len(data) + MEMORY_SLACK_BYTES
        ):
            break
    return RequestCost(response, longest_hold, grown[0])


async def _post_and_measure(
    running: ServiceThread, path: str, data: bytes
) -> tuple[Response, float]:
    task = asyncio.create_task(running.client.post(path, data))
    longest_hold = 0.0
    await running.client.get("/health")
    while not task.done():
        began = time.process_time()
        await asyncio.sleep(0.001)
        assert (await running.client.get("/health")).status == 200
        longest_hold = max(longest_hold, time.process_time() - began)
    return await task, longest_hold


@contextmanager
def _memory_growth() -> Iterator[list[int]]:
    """Bytes by which this process's resident memory grew at most meanwhile."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux: /proc has the peak of resident memory")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, response_bytes = _peak_resident_bytes(), [0]
    yield response_bytes
    response_bytes[0] = _peak_resident_bytes() - before


def _peak_resident_bytes() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return 1024 * int(line.split()[1])
