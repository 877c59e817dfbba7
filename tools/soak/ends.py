"""How a server ends, and what it does when its worker is killed."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tools.soak.client import connected, post
from tools.soak.server import Failed, Server

BODY = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}


async def streams(server: Server, count: int, then: Callable[[], Awaitable[None]]) -> list[bytes]:
    """``count`` streams; once each has begun, ``then``; all that they brought."""
    begun = asyncio.Barrier(count + 1)

    async def one() -> bytes:
        async with asyncio.timeout(300), connected(server) as (reader, writer):
            writer.write(post("/v1/completions", json.dumps({**BODY, "model": server.model}).encode()))
            first = await reader.readuntil(b"data: ")
            await begun.wait()
            return first + await reader.read(-1)

    async def act() -> list[bytes]:
        await begun.wait()
        await then()
        return []

    *told, _ = await asyncio.gather(*(one() for _ in range(count)), act())
    return [each for each in told if isinstance(each, bytes)]


def drains(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """SIGTERM: what runs is finished, what is new is refused with 503, then exit code 0."""
    with Server(engine, [*flags, "--shutdown-timeout", "120"]) as server:
        refused: list[int] = []

        async def then() -> None:
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait, 503, 10)
            refused.append((await asyncio.to_thread(server.ask, "/v1/completions", {**BODY, "stream": False}))[0])

        server.workers()
        told = asyncio.run(streams(server, 4, then))
        code = server.end()
        whole = sum(1 for each in told if b"data: [DONE]" in each and b'"finish_reason":"length"' in each)
        left = server.left()
    found = {"finished": whole, "of": len(told), "new_requests": refused[0], "exit_code": code, "left": left}
    return {"what": "SIGTERM", "ok": (whole, refused, code, left) == (len(told), [503], 0, []), **found}


def stops(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """A second SIGTERM: running answers end with an error event, then exit code 0, at once."""
    with Server(engine, [*flags, "--shutdown-timeout", "120"]) as server:
        began = 0.0

        async def then() -> None:
            nonlocal began
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait, 503, 10)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)

        server.workers()
        told = asyncio.run(streams(server, 4, then))
        code, seconds = server.end(), time.monotonic() - began
        errors = sum(1 for each in told if b'data: {"error"' in each and b"[DONE]" not in each)
        left = server.left()
    found = {"with_error": errors, "of": len(told), "seconds": round(seconds, 2), "exit_code": code, "left": left}
    return {"what": "SIGTERM twice", "ok": (errors, code, left) == (len(told), 0, []) and seconds < 15, **found}


def worker_killed(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """kill -9 of a worker that answers: error events, /health 503, another worker, and answers again."""
    with Server(engine, flags) as server:
        (worker,) = server.workers()
        health: list[Any] = []

        async def then() -> None:
            worker.kill()
            health.append(await asyncio.to_thread(server.wait, 503, 10))

        told = asyncio.run(streams(server, 4, then))
        errors = sum(1 for each in told if b"engine_restarted" in each and b"[DONE]" not in each)
        began = time.monotonic()
        body = server.wait(200)
        healed = time.monotonic() - began
        again, _ = server.ask("/v1/completions", {**BODY, "model": server.model, "stream": False, "max_tokens": 4})
        server.idle()
        state = health[0]["engines"][0]["state"]
        server.workers()
    left = server.left()
    found = {"with_error": errors, "of": len(told), "health": state, "restarts": body["engines"][0]["restarts"]}
    found |= {"healed_s": round(healed, 2), "asked_again": again, "left": left}
    ok = (errors, found["restarts"], again, left) == (len(told), 1, 200, []) and state in ("restarting", "loading")
    return {"what": "kill -9 of a worker that answers", "ok": ok, **found}


def killed_while_loading(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """kill -9 of a worker that loads for the first time: the server says so and ends with an error."""
    with Server(engine, flags, ready=False) as server:
        deadline = time.monotonic() + 30
        while not (workers := server.workers()):
            if time.monotonic() > deadline:
                raise Failed("no worker has been started")
            time.sleep(0.005)
        workers[0].suspend()  # or it may be ready before anybody has asked
        status, _ = server.ask("/health")
        workers[0].kill()
        code = server.end()
        left = server.left()
    ok = status == 503 and code != 0 and not left
    return {"what": "kill -9 of a worker that loads", "ok": ok, "health": status, "exit_code": code, "left": left}


def server_killed(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """kill -9 of the server itself: its worker ends with it."""
    with Server(engine, flags) as server:
        server.workers()
        server.process.kill()
        code = server.end()
        left = server.left(20)
    return {"what": "kill -9 of the server", "ok": not left, "exit_code": code, "left": left}


ALL = (drains, stops, worker_killed, killed_while_loading, server_killed)


def ends(engine: Path, flags: Sequence[str], told: Callable[[int, int], None]) -> dict[str, Any]:
    """All of them, one after another."""
    found = []
    for place, each in enumerate(ALL):
        found.append(each(engine, flags))
        told(place + 1, len(ALL))
    return {"what": "ends and kills", "ok": all(each["ok"] for each in found), "each": found}
