"""How long a request keeps a server's event loop from everybody else, and how much memory it takes
meanwhile.
"""

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
    """Send a request while /health is asked again and again.

    growth: None: memory does not count.
    """
    held = float("inf")
    for _ in range(MAX_TRIES):
        with _memory_growth() as grown:
            response, now = running.run(_post_and_measure(running, path, data))
        held = min(held, now)
        if held <= MAX_BLOCKED_SECONDS and (
            growth is None or grown[0] <= growth * len(data) + MEMORY_SLACK_BYTES
        ):
            break
    return RequestCost(response, held, grown[0])


async def _post_and_measure(
    running: ServiceThread, path: str, data: bytes
) -> tuple[Response, float]:
    asked = asyncio.create_task(running.client.post(path, data))
    held = 0.0
    await running.client.get("/health")
    while not asked.done():
        began = time.process_time()
        await asyncio.sleep(0.001)
        assert (await running.client.get("/health")).status == 200
        held = max(held, time.process_time() - began)
    return await asked, held


@contextmanager
def _memory_growth() -> Iterator[list[int]]:
    """Bytes by which this process's resident memory grew at most meanwhile."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux: /proc tells the peak of resident memory")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, told = _peak_resident_bytes(), [0]
    yield told
    told[0] = _peak_resident_bytes() - before


def _peak_resident_bytes() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return 1024 * int(line.split()[1])
