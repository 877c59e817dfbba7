"""A watchdog's time, which passes when a test says so, and a worker process with a fault in it."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

from modelmill.serve.child import Child, Process
from modelmill.serve.watchdog import FIRST, MOST_TURN

FOR_EVER = int(FIRST / MOST_TURN) * 2
"""More turns than any worker of these tests may be silent."""


class Turns:
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


PLANT = """
import sys
from modelmill.runtime.loop import Loop
from modelmill.serve.worker import main

step = Loop.step

def planted(loop):
    seqs = [seq for live in loop.ledger.live.values() for seq in live]
    while any(seq.request.cache_salt == "hang" and seq.outputs > 2 for seq in seqs):
        pass
    return step(loop)

Loop.step = planted
sys.exit(main(sys.argv[1:]))
"""


async def planted() -> tuple[socket.socket, Child]:
    """A worker process whose step never ends once a request with the salt "hang" has some tokens."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PLANT, str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
        )
    return ours, Process(process)


async def until(true: Any) -> None:
    """Give the event loop's other tasks their turns until it is so."""
    while not true():
        await asyncio.sleep(0.001)
