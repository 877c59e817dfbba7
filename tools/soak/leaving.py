"""Clients that go away in the middle of a stream: then nothing runs, and every KV page is free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tools.soak.client import ask, leave
from tools.soak.server import Failed, Server


def leaving(server: Server, count: int, told: Callable[[int, int], None], at_once: int = 50) -> dict[str, Any]:
    """``count`` clients; every second one resets its connection, every fifth leaves before anything came."""
    workers = {each.pid for each in server.workers()}
    body = {"model": server.model, "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    got: list[int] = []

    async def some(begin: int, end: int) -> None:
        many = [
            leave(server, "/v1/completions", {**body, "n": 1 + place % 2}, place % 5, rude=place % 2 == 1)
            for place in range(begin, end)
        ]
        got.extend(await asyncio.gather(*many))

    began = time.monotonic()
    for begin in range(0, count, at_once):
        asyncio.run(some(begin, min(begin + at_once, count)))
        told(min(begin + at_once, count), count)
    gauges = server.idle(120)
    status, _ = asyncio.run(ask(server, "/v1/completions", {**body, "stream": False, "max_tokens": 4}))
    if {each.pid for each in server.workers()} != workers or status != 200:
        raise Failed(f"afterwards the server answers {status}, or a worker is another one")
    return {
        "what": f"{count} clients that left in the middle",
        "ok": True,
        "had_read_something": sum(1 for each in got if each),
        "seconds": round(time.monotonic() - began, 1),
        "after": gauges,
    }
