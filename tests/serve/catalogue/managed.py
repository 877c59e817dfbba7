"""Models of a catalogue whose workers are threads, with launches that a test can delay or fail."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from modelmill.artifact.manifest import Manifest
from modelmill.runtime.engine_core import EngineCore
from modelmill.serve.catalogue.entries import CatalogueEntry, read_manifest
from modelmill.serve.catalogue.managed_model import ManagedModel
from modelmill.serve.catalogue.manager import ModelManager, cancel_and_wait
from modelmill.serve.catalogue.model_loader import ModelLoader
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.worker_messages import OpenEngine
from tests.runtime import tiny
from tests.serve.thread_worker import ThreadLauncher, ThreadWorker, ids_only_processor


class GatedLauncher(ThreadLauncher):
    """Launches workers while ``gate`` is set; ``error`` fails the launch."""

    def __init__(self, make: Callable[[], EngineCore] = tiny.make_engine) -> None:
        super().__init__(make)
        self.gate = asyncio.Event()
        self.gate.set()
        self.launches = 0
        self.error: OSError | None = None

    async def __call__(self) -> tuple[socket.socket, ThreadWorker]:
        self.launches += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().__call__()


class Timers:
    """``call_later`` whose timers fire when a test says so."""

    def __init__(self) -> None:
        self.pending: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        handle = asyncio.get_running_loop().call_later(1e6, call)
        self.pending.append((seconds, call, handle))
        return handle

    @property
    def seconds(self) -> list[float]:
        """Of the timers that were not cancelled."""
        return [seconds for seconds, _, handle in self.pending if not handle.cancelled()]

    def fire(self) -> None:
        """Let all of them expire."""
        pending, self.pending = self.pending, []
        for _, call, handle in pending:
            if not handle.cancelled():
                handle.cancel()
                call()


class Models:
    """A manager of models whose workers are threads."""

    def __init__(
        self,
        path: Path,
        *names: str,
        keep_alive: float = math.inf,
        make: Callable[[], EngineCore] = tiny.make_engine,
        sleep_bytes: int = 0,
    ) -> None:
        self.path = path
        self.launchers = {name: GatedLauncher(make) for name in names}
        self.timers = Timers()
        manifest = read_manifest(path)
        models = [
            ManagedModel(CatalogueEntry(name, path), self._engine(name, manifest), keep_alive, 1000)
            for name in names
        ]
        self.manager = ModelManager(
            models,
            ModelLoader(None, sleep_bytes=sleep_bytes),
            16,
            lambda model, manifest: self._engine(model.name, manifest),
            call_later=self.timers.call_later,
        )

    def _engine(self, name: str, manifest: Manifest) -> EngineClient:
        return EngineClient(
            name,
            OpenEngine(str(self.path), {}, {}),
            max_waiting=64,
            launch=self.launchers[name],
            load_text_processor=ids_only_processor,
            restart_delay=0.001,
            manifest=manifest,
        )

    def __getitem__(self, name: str) -> ManagedModel:
        return next(each for each in self.manager.models if each.name == name)

    def acquire(self, name: str, keep_alive: float | None = None) -> asyncio.Task[Any]:
        """A request for a model; it has joined the queue when this returns."""
        return asyncio.ensure_future(self.manager.acquire_lease(self[name], keep_alive))

    async def limit_to_one(self) -> None:
        """Let the memory budget hold one model and a half."""
        first = self.manager.models[0]
        lease = await self.manager.acquire_lease(first)
        nbytes = first.planned_bytes
        lease.release()
        await self.manager.unload(first)
        for model in self.manager.models:
            model.planned_bytes = nbytes
        self.manager.loader.budget_bytes = nbytes * 3 // 2

    async def until(self, condition: Callable[[], object]) -> None:
        """Let other tasks run until a condition holds."""
        async with asyncio.timeout(50):
            while not condition():
                await asyncio.sleep(0.001)


@asynccontextmanager
async def managed_models(path: Path, *names: str, **options: Any) -> AsyncIterator[Models]:
    """A manager that runs, with options of ``Models``; all its workers end with the block."""
    models = Models(path, *names, **options)
    task = asyncio.create_task(models.manager.run())
    try:
        yield models
    finally:
        for launcher in models.launchers.values():
            launcher.gate.set()
        await models.manager.close()
        await cancel_and_wait(task)
