"""How a server ends, and what it does when its worker is killed."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tools.soak.client import connect, post
from tools.soak.server import SoakFailure, SoakServer

BODY = {
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


async def streams(
    server: SoakServer, count: int, then: Callable[[], Awaitable[None]]
) -> list[bytes]:
    """``count`` streams; once each has begun, ``then``; all that they brought."""
    begun = asyncio.Barrier(count + 1)

    async def one() -> bytes:
        async with asyncio.timeout(300), connect(server) as (reader, writer):
            writer.write(
                post("/v1/completions", json.dumps({**BODY, "model": server.model}).encode())
            )
            first = await reader.readuntil(b"data: ")
            await begun.wait()
            return first + await reader.read(-1)

    async def act() -> list[bytes]:
        await begun.wait()
        await then()
        return []

    *told, _ = await asyncio.gather(*(one() for _ in range(count)), act())
    return [each for each in told if isinstance(each, bytes)]


def check_drain(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """SIGTERM: what runs is finished, what is new is refused with 503, then exit code 0."""
    with SoakServer(engine, [*flags, "--shutdown-timeout", "120"]) as server:
        refused: list[int] = []

        async def then() -> None:
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait_for_health, 503, 10)
            refused.append(
                (
                    await asyncio.to_thread(
                        server.request, "/v1/completions", {**BODY, "stream": False}
                    )
                )[0]
            )

        server.workers()
        told = asyncio.run(streams(server, 4, then))
        code = server.wait_for_exit()
        whole = sum(
            1 for each in told if b"data: [DONE]" in each and b'"finish_reason":"length"' in each
        )
        left = server.leftover_processes()
    found = {
        "finished": whole,
        "of": len(told),
        "new_requests": refused[0],
        "exit_code": code,
        "left": left,
    }
    return {
        "what": "SIGTERM",
        "ok": (whole, refused, code, left) == (len(told), [503], 0, []),
        **found,
    }


def check_second_sigterm(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """A second SIGTERM: running answers end with an error event, then exit code 0, at once."""
    with SoakServer(engine, [*flags, "--shutdown-timeout", "120"]) as server:
        began = 0.0

        async def then() -> None:
            nonlocal began
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait_for_health, 503, 10)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)

        server.workers()
        told = asyncio.run(streams(server, 4, then))
        code, seconds = server.wait_for_exit(), time.monotonic() - began
        errors = sum(1 for each in told if b'data: {"error"' in each and b"[DONE]" not in each)
        left = server.leftover_processes()
    found = {
        "with_error": errors,
        "of": len(told),
        "seconds": round(seconds, 2),
        "exit_code": code,
        "left": left,
    }
    return {
        "what": "SIGTERM twice",
        "ok": (errors, code, left) == (len(told), 0, []) and seconds < 15,
        **found,
    }


def check_worker_killed(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """kill -9 of a worker that answers: error events, /health 503, another worker, and answers
    again.
    """
    with SoakServer(engine, flags) as server:
        (worker,) = server.workers()
        health: list[Any] = []

        async def then() -> None:
            worker.kill()
            health.append(await asyncio.to_thread(server.wait_for_health, 503, 10))

        told = asyncio.run(streams(server, 4, then))
        errors = sum(1 for each in told if b"engine_restarted" in each and b"[DONE]" not in each)
        began = time.monotonic()
        body = server.wait_for_health(200)
        healed = time.monotonic() - began
        again, _ = server.request(
            "/v1/completions", {**BODY, "model": server.model, "stream": False, "max_tokens": 4}
        )
        server.wait_until_idle()
        state = health[0]["engines"][0]["state"]
        server.workers()
    left = server.leftover_processes()
    found = {
        "with_error": errors,
        "of": len(told),
        "health": state,
        "restarts": body["engines"][0]["restarts"],
    }
    found |= {"healed_s": round(healed, 2), "asked_again": again, "left": left}
    ok = (errors, found["restarts"], again, left) == (len(told), 1, 200, []) and state in (
        "restarting",
        "loading",
    )
    return {"what": "kill -9 of a worker that answers", "ok": ok, **found}


def check_killed_while_loading(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """kill -9 of a worker that loads for the first time: the server says so and ends with an
    error.
    """
    with SoakServer(engine, flags, ready=False) as server:
        deadline = time.monotonic() + 30
        while not (workers := server.workers()):
            if time.monotonic() > deadline:
                raise SoakFailure("no worker has been started")
            time.sleep(0.005)
        workers[0].suspend()  # or it may be ready before anybody has asked
        status, _ = server.request("/health")
        workers[0].kill()
        code = server.wait_for_exit()
        left = server.leftover_processes()
    ok = status == 503 and code != 0 and not left
    return {
        "what": "kill -9 of a worker that loads",
        "ok": ok,
        "health": status,
        "exit_code": code,
        "left": left,
    }


def check_server_killed(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """kill -9 of the server itself: its worker ends with it."""
    with SoakServer(engine, flags) as server:
        server.workers()
        server.process.kill()
        code = server.wait_for_exit()
        left = server.leftover_processes(20)
    return {"what": "kill -9 of the server", "ok": not left, "exit_code": code, "left": left}


CHECKS = (
    check_drain,
    check_second_sigterm,
    check_worker_killed,
    check_killed_while_loading,
    check_server_killed,
)


def run_shutdown_checks(
    engine: Path, flags: Sequence[str], on_progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """All of them, one after another."""
    found = []
    for place, each in enumerate(CHECKS):
        found.append(each(engine, flags))
        on_progress(place + 1, len(CHECKS))
    return {"what": "ends and kills", "ok": all(each["ok"] for each in found), "each": found}
