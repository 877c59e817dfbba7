"""A watchdog's time, which a test advances, and a worker process with a fault in it."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

from modelmill.serve.watchdog import MAX_POLL_SECONDS, MIN_FIRST_HEARTBEAT_TIMEOUT
from modelmill.serve.worker_process import WorkerProcess, WorkerSubprocess

MANY_POLLS = int(MIN_FIRST_HEARTBEAT_TIMEOUT / MAX_POLL_SECONDS) * 2
"""More turns than any worker of these tests may be silent."""


class ManualClock:
    """``asyncio.sleep`` of a watchdog."""

    def __init__(self) -> None:
        self._granted: asyncio.Queue[None] = asyncio.Queue()

    async def __call__(self, _: float) -> None:
        await self._granted.get()

    def grant(self, count: int) -> None:
        """So many turns pass as soon as the watchdog is there for them."""
        for _ in range(count):
            self._granted.put_nowait(None)

    async def spend(self, count: int) -> None:
        """The same; returns when they have passed."""
        self.grant(count)
        while not self._granted.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)


HANGING_WORKER = """
import sys
from modelmill.runtime.engine_core import EngineCore
from modelmill.serve.worker import main

step = EngineCore.step

def hanging_step(engine_core):
    seqs = [seq for live in engine_core.output_processor.live_sequences.values() for seq in live]
    while any(seq.request.cache_salt == "hang" and seq.num_outputs > 2 for seq in seqs):
        pass
    return step(engine_core)

EngineCore.step = hanging_step
sys.exit(main(sys.argv[1:]))
"""


async def launch_hanging_worker() -> tuple[socket.socket, WorkerProcess]:
    """A worker process whose step never ends once a request with the salt "hang" has some
    tokens.
    """
    api_sock, worker_sock = socket.socketpair()
    with worker_sock:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HANGING_WORKER, str(worker_sock.fileno())),
            pass_fds=(worker_sock.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
        )
    return api_sock, WorkerSubprocess(process)


async def wait_until(condition: Any) -> None:
    """Give the event loop's other tasks their turns until it is so."""
    while not condition():
        await asyncio.sleep(0.001)
