"""Clients that disconnect during a stream: afterwards nothing runs, and every KV page is free."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from modelmill.core.progress_callback import Progress
from tools.soak.client import disconnect_mid_stream, send_request
from tools.soak.server import SoakFailure, SoakServer


def run_disconnects(
    server: SoakServer, count: int, on_progress: Progress, concurrency: int = 50
) -> dict[str, Any]:
    """Run ``count`` clients.

    Every second one resets its connection; every fifth disconnects before it reads anything.
    """
    workers = {each.pid for each in server.workers()}
    body = {
        "model": server.model,
        "prompt": "Once upon a time",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    received: list[int] = []

    async def run_batch(begin: int, end: int) -> None:
        clients = [
            disconnect_mid_stream(
                server,
                "/v1/completions",
                {**body, "n": 1 + index % 2},
                index % 5,
                reset=index % 2 == 1,
            )
            for index in range(begin, end)
        ]
        received.extend(await asyncio.gather(*clients))

    started_at = time.monotonic()
    for begin in range(0, count, concurrency):
        asyncio.run(run_batch(begin, min(begin + concurrency, count)))
        on_progress("requests", min(begin + concurrency, count), count)
    gauges = server.wait_until_idle(120)
    status, _ = asyncio.run(
        send_request(server, "/v1/completions", {**body, "stream": False, "max_tokens": 4})
    )
    if {each.pid for each in server.workers()} != workers or status != 200:
        raise SoakFailure(f"afterwards the server answers {status}, or a worker was replaced")
    return {
        "what": f"{count} clients that left in the middle",
        "ok": True,
        "had_read_something": sum(1 for each in received if each),
        "seconds": round(time.monotonic() - started_at, 1),
        "after": gauges,
    }
