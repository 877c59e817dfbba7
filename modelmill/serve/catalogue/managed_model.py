"""One model of the catalogue: its engine, the requests that use it, and when it expires."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from modelmill.artifact.manifest import Manifest
from modelmill.serve.catalogue.entries import (
    CatalogueEntry,
    manifest_fingerprint,
    read_manifest,
)
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.engine_state import EngineState
from modelmill.serve.segmentation_messages import SEGMENTATION_ENGINE_TYPE


@dataclass(eq=False)
class EngineInstance:
    """A running worker of a model, and how many requests use it.

    Attributes:
        engine: its client.
        nbytes: memory of weights, KV pages and recurrent state: planned, then as reported.
        host_bytes: of the host that its weights take while it sleeps.
        leases: requests that use it.
        draining: it takes no further request and is unloaded when the last one has ended.
        task: runs the client.
    """

    engine: EngineClient
    nbytes: int
    host_bytes: int = 0
    leases: int = 0
    draining: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def is_available(self) -> bool:
        """Whether it takes requests now."""
        return self.engine.state is EngineState.READY and not self.draining

    @property
    def is_sleeping(self) -> bool:
        """Whether it has given its memory back, and can wake up."""
        return self.engine.state is EngineState.SLEEPING

    def set_task(self, task: asyncio.Task[None]) -> None:
        """Record the task that runs the client."""
        self.task = task

    def set_memory_bytes(self, nbytes: int, host_bytes: int = 0) -> None:
        """Record the memory that the worker reported, and that of the host if it sleeps."""
        self.nbytes, self.host_bytes = nbytes, host_bytes

    def set_draining(self, draining: bool) -> None:
        """Take no further request, or take requests again."""
        self.draining = draining

    def adjust_lease_count(self, change: int) -> None:
        """Count one more lease, or one less."""
        self.leases += change


class Lease:
    """The use of an engine by one request: it is not unloaded before ``release``."""

    def __init__(self, instance: EngineInstance, on_release: Callable[[], None]) -> None:
        self.engine = instance.engine
        self._on_release: Callable[[], None] | None = on_release

    def release(self) -> None:
        """End the use; a second call does nothing."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()


@dataclass(eq=False)
class ManagedModel:
    """State of a model of the catalogue.

    Attributes:
        entry: what the catalogue says.
        engine: the client of its worker, or of the next one.
        pinned: never unloaded by time or memory.
        default_keep_alive: seconds that it stays loaded unused.
        keep_alive: what the last request that said so wants instead, until it is unloaded.
        planned_bytes: memory that it will take, or took when it was loaded.
        instance: the loaded or loading worker; None: unloaded.
        last_used: when a request last began or ended.
        expires_at: when it is unloaded if no request comes, by the manager's clock.
        timer: of the expiry.
        error: why it could not be loaded the last time.
        unloading: the task that unloads it.
        fingerprint: of the files that were loaded.
    """

    entry: CatalogueEntry
    engine: EngineClient
    default_keep_alive: float
    planned_bytes: int
    pinned: bool = False
    keep_alive: float | None = None
    instance: EngineInstance | None = None
    last_used: float = 0.0
    expires_at: float | None = None
    timer: asyncio.TimerHandle | None = None
    error: str | None = None
    unloading: asyncio.Task[None] | None = None
    fingerprint: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        self.fingerprint = manifest_fingerprint(self.path)

    @property
    def name(self) -> str:
        """Name in requests."""
        return self.entry.name

    @property
    def path(self) -> Path:
        """The engine folder."""
        return self.entry.path

    @property
    def state(self) -> str:
        """Either "unloaded", "loading", "loaded", "sleeping" or "unloading"."""
        if self.instance is None:
            return "unloaded"
        if self.instance.draining or self.unloading is not None:
            return "unloading"
        if self.instance.is_sleeping:
            return "sleeping"
        return "loaded" if self.engine.state is EngineState.READY else "loading"

    @property
    def idle_timeout(self) -> float:
        """Seconds that it stays loaded unused; infinite: no limit."""
        if self.pinned:
            return math.inf
        return self.default_keep_alive if self.keep_alive is None else self.keep_alive

    @property
    def has_changed_files(self) -> bool:
        """Whether the engine folder was rebuilt since its files were read."""
        return manifest_fingerprint(self.path) != self.fingerprint

    def reread_manifest(self) -> Manifest:
        """Read the manifest again, which is then the one that is loaded.

        Raises:
            ArtifactError: it is missing or damaged.
        """
        fingerprint, manifest = manifest_fingerprint(self.path), read_manifest(self.path)
        self.fingerprint = fingerprint
        return manifest

    def loaded_bytes(self, engine: EngineClient) -> int:
        """Bytes of weights, KV pages and recurrent state, as the worker reported its limits."""
        if engine.engine_type == SEGMENTATION_ENGINE_TYPE:
            return self.planned_bytes
        assert engine.manifest is not None
        return engine.manifest.weight_bytes + engine.cache_bytes

    def attach_instance(self, instance: EngineInstance) -> None:
        """Use a worker, whose client takes the place of the one before."""
        self.instance, self.engine = instance, instance.engine

    def detach_instance(self) -> None:
        """Have no worker; remember why the last one could not be kept running."""
        if self.engine.state is EngineState.FAILED:
            self.error = self.engine.error
        self.instance = None
        self.cancel_expiry_timer()

    def record_loaded_bytes(self, nbytes: int) -> None:
        """Record a load and the memory that it takes."""
        self.planned_bytes, self.error = nbytes, None

    def record_load_error(self, reason: str) -> None:
        """Record why it cannot be loaded."""
        self.error = reason

    def record_last_use(self, now: float) -> None:
        """Record that a request begins or ends."""
        self.last_used = now

    def set_unload_task(self, task: asyncio.Task[None] | None) -> None:
        """Record the task that unloads it; None: it has ended, and with it the keep-alive."""
        self.unloading = task
        if task is None:
            self.keep_alive = None

    def set_keep_alive(self, seconds: float) -> None:
        """Record what a request wants."""
        self.keep_alive = seconds

    def set_pinned(self, pinned: bool) -> None:
        """Pin or unpin it."""
        self.pinned = pinned

    def set_expiry_timer(self, expires_at: float, timer: asyncio.TimerHandle) -> None:
        """Record when it expires."""
        self.expires_at, self.timer = expires_at, timer

    def cancel_expiry_timer(self) -> None:
        """Forget the expiry."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.expires_at = None
