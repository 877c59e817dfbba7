"""Thousands of hostile requests.

Each must get a response or an error; afterwards the same worker must be idle and no larger.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from modelmill.core.progress_callback import Progress
from tools.soak import large_requests
from tools.soak.client import connect, send_request
from tools.soak.hostile_requests import random_request, response_problem
from tools.soak.memory_trend import fit_trend
from tools.soak.server import SoakFailure, SoakServer

CONCURRENCY = 16
RAW_REQUESTS: list[bytes] = [
    b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 10000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    b"nonsense\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n",
    b"GET /" + b"z" * 10**5,
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: "
    b"2\r\n\r\n",
    b"DELETE /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    b"\x00" * 1000 + b"\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: "
    b"chunked\r\n\r\nZZ\r\n",
]  # fmt: skip
"""Invalid or incomplete requests; one request in fifty is one of them."""
LARGE_FRACTION = 0.02
"""Fraction of requests with long, deep or wide values."""


async def send_raw(server: SoakServer, data: bytes) -> int:
    """Send bytes; return the status, or 0 if the connection is closed without a response."""
    try:
        async with asyncio.timeout(60), connect(server) as (reader, writer):
            writer.write(data)
            head = await reader.read(-1)
    except ConnectionError:
        return 0  # the server closed the connection during the write
    return int(head.split(None, 2)[1]) if head.startswith(b"HTTP/") else 0


async def send_one(server: SoakServer, seed: int, index: int, counts: Counter[int]) -> None:
    """Send request number ``index``.

    Raises:
        SoakFailure: the response is not allowed.
    """
    rng = random.Random(f"{seed} {index}")
    if rng.random() < 0.02:
        status = await send_raw(server, rng.choice(RAW_REQUESTS))
        if status >= 500:
            raise SoakFailure(f"an invalid request got {status}")
    else:
        is_large = rng.random() < LARGE_FRACTION
        path, data = (large_requests.random_large_request if is_large else random_request)(
            rng, server.model, server.segment_model
        )
        try:
            status, body = await send_request(server, path, data)
        except (OSError, TimeoutError) as error:
            raise SoakFailure(
                f"request {index} of seed {seed} at {path}: {type(error).__name__}"
            ) from None
        problem = response_problem(status, body)
        if problem is not None:
            raise SoakFailure(
                f"request {index} of seed {seed} at {path}: {problem}: {data[:300]!r}"
            )
    counts[status] += 1


async def _poll_health(server: SoakServer, waits: list[float]) -> None:
    """Request /health repeatedly; append the seconds of each response to ``waits``."""
    while True:
        started_at = time.monotonic()
        async with connect(server) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            await reader.read(-1)
        waits.append(time.monotonic() - started_at)
        await asyncio.sleep(0.02)


def fuzz(server: SoakServer, count: int, seed: int, on_progress: Progress) -> dict[str, Any]:
    """Send ``count`` requests, CONCURRENCY at a time.

    Raises:
        SoakFailure: a response is not allowed, or the server is not idle afterwards.
    """
    workers = {each.pid for each in server.workers()}
    statuses: Counter[int] = Counter()
    series: list[tuple[float, float, float]] = []
    waits: list[float] = []
    started_at = time.monotonic()

    async def run_batch(begin: int, end: int) -> None:
        slots = asyncio.Semaphore(CONCURRENCY)

        async def send(index: int) -> None:
            async with slots:
                await send_one(server, seed, index, statuses)

        health_task = asyncio.create_task(_poll_health(server, waits))
        try:
            await asyncio.gather(*(send(index) for index in range(begin, end)))
        finally:
            health_task.cancel()

    size = max(count // 40, CONCURRENCY)
    for begin in range(0, count, size):
        asyncio.run(run_batch(begin, min(begin + size, count)))
        memory = server.memory()
        series.append((time.monotonic() - started_at, memory["api"], memory["worker"]))
        on_progress("requests", min(begin + size, count), count)
    gauges = server.wait_until_idle()
    if {each.pid for each in server.workers()} != workers:
        raise SoakFailure("a worker was replaced")
    seconds, api, worker = (list(column) for column in zip(*series, strict=True))
    lines = {"api": fit_trend(seconds, api), "worker": fit_trend(seconds, worker)}
    return {
        "what": f"{count} hostile requests",
        "ok": all(line.flat for line in lines.values()),
        "statuses": dict(sorted(statuses.items())),
        "after": gauges,
        "slowest_health_ms": round(1000 * max(waits, default=0.0), 1),
        "memory": {name: asdict(line) for name, line in lines.items()},
        "series": series,
    }
