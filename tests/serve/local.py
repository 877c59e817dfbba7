"""A worker on a thread of this process, with a tiny loop: the whole protocol without the seconds of a start."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from modelmill.artifact.manifest import Manifest
from modelmill.core.types import SamplingParams
from modelmill.dialogue import Dialogue
from modelmill.language import Language
from modelmill.runtime.loop import Loop
from modelmill.serve.engine import Engine
from modelmill.serve.message import Open
from modelmill.serve.worker import Inbox, Wire, Worker, ready
from tests.runtime import tiny
from tests.serve.running import patient


class Thread:
    """A worker thread as serve.child.Child."""

    pid = 0

    def __init__(self, make: Callable[[], Loop]) -> None:
        self.ours, self._theirs = socket.socketpair()
        self.loop = make()
        self.stepping = threading.Event()
        self.stepping.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wire = Wire(self._theirs)
        assert isinstance(wire.receive(), Open)
        wire.send(ready(self.loop, "tiny"))
        step = self.loop.step

        def held() -> Any:
            self.stepping.wait()
            return step()

        self.loop.step = held  # type: ignore[method-assign]
        Worker(self.loop, wire, Inbox(wire, lost=self.stepping.set)).run()
        self._theirs.close()

    def kill(self) -> None:
        # the thread may be closing it at this moment
        with contextlib.suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)

    async def wait(self) -> int:
        await asyncio.to_thread(self._thread.join)
        return -9


class Launcher:
    """serve.child.Launch that keeps what it started."""

    def __init__(self, make: Callable[[], Loop] = tiny.loop) -> None:
        self._make = make
        self.children: list[Thread] = []

    async def __call__(self) -> tuple[socket.socket, Thread]:
        child = await asyncio.to_thread(Thread, self._make)
        self.children.append(child)
        return child.ours, child


def language(*_: Any) -> Language:
    """An ids-only text side."""
    manifest = Manifest(
        schema=1, kind="causal", model_type="llama", packing="rows/1", max_model_len=128, config={}, build={},
        weights={}, aliases={}, generation={}, source={}, versions={}, files={},
    )  # fmt: skip
    return Language(Path("tiny"), manifest, {})


@asynccontextmanager
async def served(launcher: Launcher | None = None, queue: int = 64) -> Any:
    """An engine that is ready, and its launcher."""
    launcher = launcher or Launcher()
    engine = patient(Engine("tiny", Open("tiny", {}, {}), queue=queue, start=launcher, read=language, pause=0.001))
    task = asyncio.create_task(engine.run())
    await engine.settled.wait()
    try:
        yield engine, launcher
    finally:
        await engine.close()
        await task


def ask(engine: Engine, prompt: tuple[int, ...], **params: Any) -> Dialogue:
    """A request, greedy unless told otherwise."""
    how = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})
    return engine.language.request(prompt, how)
