"""Checks how a server ends, and how it handles a killed worker."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from modelmill.core.progress_callback import Progress
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
    """Run ``count`` streams; call ``then`` once each has begun; return what they received."""
    begun = asyncio.Barrier(count + 1)

    async def run_stream() -> bytes:
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

    *results, _ = await asyncio.gather(*(run_stream() for _ in range(count)), act())
    return [each for each in results if isinstance(each, bytes)]


def check_drain(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """SIGTERM: running requests finish, new ones are refused with 503, then exit code 0."""
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
        bodies = asyncio.run(streams(server, 4, then))
        code = server.wait_for_exit()
        num_finished = sum(
            1 for each in bodies if b"data: [DONE]" in each and b'"finish_reason":"length"' in each
        )
        leftover = server.leftover_processes()
    result = {
        "finished": num_finished,
        "of": len(bodies),
        "new_requests": refused[0],
        "exit_code": code,
        "left": leftover,
    }
    return {
        "what": "SIGTERM",
        "ok": (num_finished, refused, code, leftover) == (len(bodies), [503], 0, []),
        **result,
    }


def check_second_sigterm(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """A second SIGTERM: running requests end with an error event, then exit code 0, at once."""
    with SoakServer(engine, [*flags, "--shutdown-timeout", "120"]) as server:
        sent_at = 0.0

        async def then() -> None:
            nonlocal sent_at
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait_for_health, 503, 10)
            sent_at = time.monotonic()
            server.process.send_signal(signal.SIGTERM)

        server.workers()
        bodies = asyncio.run(streams(server, 4, then))
        code, seconds = server.wait_for_exit(), time.monotonic() - sent_at
        errors = sum(1 for each in bodies if b'data: {"error"' in each and b"[DONE]" not in each)
        leftover = server.leftover_processes()
    result = {
        "with_error": errors,
        "of": len(bodies),
        "seconds": round(seconds, 2),
        "exit_code": code,
        "left": leftover,
    }
    return {
        "what": "SIGTERM twice",
        "ok": (errors, code, leftover) == (len(bodies), 0, []) and seconds < 15,
        **result,
    }


def check_worker_killed(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Worker killed with SIGKILL while it answers.

    Expects error events, /health 503, a new worker, and then normal responses.
    """
    with SoakServer(engine, flags) as server:
        (worker,) = server.workers()
        health: list[Any] = []

        async def then() -> None:
            worker.kill()
            health.append(await asyncio.to_thread(server.wait_for_health, 503, 10))

        bodies = asyncio.run(streams(server, 4, then))
        errors = sum(1 for each in bodies if b"engine_restarted" in each and b"[DONE]" not in each)
        killed_at = time.monotonic()
        body = server.wait_for_health(200)
        recovery_seconds = time.monotonic() - killed_at
        status, _ = server.request(
            "/v1/completions", {**BODY, "model": server.model, "stream": False, "max_tokens": 4}
        )
        server.wait_until_idle()
        state = health[0]["engines"][0]["state"]
        server.workers()
    leftover = server.leftover_processes()
    result = {
        "with_error": errors,
        "of": len(bodies),
        "health": state,
        "restarts": body["engines"][0]["restarts"],
    }
    result |= {"healed_s": round(recovery_seconds, 2), "asked_again": status, "left": leftover}
    ok = (errors, result["restarts"], status, leftover) == (len(bodies), 1, 200, []) and state in (
        "restarting",
        "loading",
    )
    return {"what": "kill -9 of a worker that answers", "ok": ok, **result}


def check_killed_while_loading(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Worker killed with SIGKILL while it loads for the first time.

    Expects that the server reports it and ends with an error.
    """
    with SoakServer(engine, flags, ready=False) as server:
        deadline = time.monotonic() + 30
        while not (workers := server.workers()):
            if time.monotonic() > deadline:
                raise SoakFailure("no worker has been started")
            time.sleep(0.005)
        workers[0].suspend()  # otherwise it may be ready before the request
        status, _ = server.request("/health")
        workers[0].kill()
        code = server.wait_for_exit()
        leftover = server.leftover_processes()
    ok = status == 503 and code != 0 and not leftover
    return {
        "what": "kill -9 of a worker that loads",
        "ok": ok,
        "health": status,
        "exit_code": code,
        "left": leftover,
    }


def check_server_killed(engine: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Server killed with SIGKILL: its worker must end as well."""
    with SoakServer(engine, flags) as server:
        server.workers()
        server.process.kill()
        code = server.wait_for_exit()
        leftover = server.leftover_processes(20)
    return {
        "what": "kill -9 of the server",
        "ok": not leftover,
        "exit_code": code,
        "left": leftover,
    }


CHECKS = (
    check_drain,
    check_second_sigterm,
    check_worker_killed,
    check_killed_while_loading,
    check_server_killed,
)


def run_shutdown_checks(
    engine: Path, flags: Sequence[str], on_progress: Progress
) -> dict[str, Any]:
    """Run all checks, one after another."""
    results = []
    for index, each in enumerate(CHECKS):
        results.append(each(engine, flags))
        on_progress("checks", index + 1, len(CHECKS))
    return {"what": "ends and kills", "ok": all(each["ok"] for each in results), "each": results}
