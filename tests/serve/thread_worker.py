"""A worker on a thread of this process, with a tiny loop: the whole protocol without the seconds of
a start.
"""

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
from modelmill.request_output_state import RequestOutputState
from modelmill.runtime.engine_core import EngineCore
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.worker import EngineWorker, make_ready_message
from modelmill.serve.worker_inbox import MessageChannel, WorkerInbox
from modelmill.serve.worker_messages import OpenEngine
from modelmill.text_processor import TextProcessor
from tests.runtime import tiny
from tests.serve.service_thread import with_long_stats_timeout


class ThreadWorker:
    """A worker thread as serve.worker_process.WorkerProcess."""

    pid = 0

    def __init__(self, make: Callable[[], EngineCore]) -> None:
        self.api_socket, self._worker_socket = socket.socketpair()
        self.engine_core = make()
        self.allow_steps = threading.Event()
        self.allow_steps.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wire = MessageChannel(self._worker_socket)
        assert isinstance(wire.receive(), OpenEngine)
        wire.send(make_ready_message(self.engine_core, "tiny"))
        step = self.engine_core.step

        def blocked_step() -> Any:
            self.allow_steps.wait()
            return step()

        self.engine_core.step = blocked_step  # type: ignore[method-assign]
        EngineWorker(
            self.engine_core, wire, WorkerInbox(wire, on_server_gone=self.allow_steps.set)
        ).run()
        self._worker_socket.close()

    def kill(self) -> None:
        # the thread may be closing it at this moment
        with contextlib.suppress(OSError):
            self._worker_socket.shutdown(socket.SHUT_RDWR)

    async def wait(self) -> int:
        await asyncio.to_thread(self._thread.join)
        return -9


class ThreadLauncher:
    """serve.worker_process.WorkerLauncher that keeps what it started."""

    def __init__(self, make: Callable[[], EngineCore] = tiny.make_engine) -> None:
        self._make = make
        self.children: list[ThreadWorker] = []

    async def __call__(self) -> tuple[socket.socket, ThreadWorker]:
        child = await asyncio.to_thread(ThreadWorker, self._make)
        self.children.append(child)
        return child.api_socket, child


def ids_only_processor(*_: Any) -> TextProcessor:
    """An ids-only text side."""
    manifest = Manifest(
        schema=1, engine_type="causal", model_type="llama", packing="rows/2", max_model_len=128,
        config={}, build={},
        weight_formats={}, aliases={}, generation={}, source={}, versions={}, files={},
    )  # fmt: skip
    return TextProcessor(Path("tiny"), manifest, {})


@asynccontextmanager
async def served_engine(launcher: ThreadLauncher | None = None, max_waiting: int = 64) -> Any:
    """An engine that is ready, and its launcher."""
    launcher = launcher or ThreadLauncher()
    engine = with_long_stats_timeout(
        EngineClient(
            "tiny",
            OpenEngine("tiny", {}, {}),
            max_waiting=max_waiting,
            launch=launcher,
            load_text_processor=ids_only_processor,
            restart_delay=0.001,
        )
    )
    task = asyncio.create_task(engine.supervise_worker())
    await engine.load_finished.wait()
    try:
        yield engine, launcher
    finally:
        await engine.close()
        await task


def make_request(
    engine: EngineClient, prompt: tuple[int, ...], **params: Any
) -> RequestOutputState:
    """A request, greedy by default."""
    options = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})
    return engine.text_processor.request(prompt, options)
