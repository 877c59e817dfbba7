"""How long a request keeps a server's event loop from everybody else, and how much memory it takes meanwhile."""

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

from tests.serve.asgi import Response
from tests.serve.running import Running

HELD = 0.05
"""Most seconds."""
GROWTH, SLACK = 10, 8 << 20
"""Memory of a request: so many times its bytes; what allocators keep for themselves."""
TRIES = 5
"""On a busy machine the loop may wait for its turn; what a request does, it does every time."""


@dataclass
class Seen:
    """response: of the last try. held: seconds of this process's CPU time between two turns of the loop, at most, in
    the best of the tries. grown: bytes of memory beyond the request's own.
    """

    response: Response
    held: float
    grown: int


def watched(running: Running, path: str, data: bytes) -> Seen:
    """Send a request while /health is asked again and again."""
    held = float("inf")
    for _ in range(TRIES):
        with _peak() as grown:
            response, now = running.do(_ask(running, path, data))
        held = min(held, now)
        if held <= HELD and grown[0] <= GROWTH * len(data) + SLACK:
            break
    return Seen(response, held, grown[0])


async def _ask(running: Running, path: str, data: bytes) -> tuple[Response, float]:
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
def _peak() -> Iterator[list[int]]:
    """Bytes by which this process's resident memory grew at most meanwhile."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux: /proc tells the peak of resident memory")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, told = _high(), [0]
    yield told
    told[0] = _high() - before


def _high() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
