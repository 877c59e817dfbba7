"""Serves the models of a catalogue: requests wait in order of arrival while their model loads.

One task loads models, one after another, for the request that has waited longest. All requests for
the loaded model go on then. A model that is loaded and not about to be unloaded is used at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric

from modelmill.artifact.manifest import Manifest
from modelmill.core import log
from modelmill.core.errors import ModelmillError, UsageError
from modelmill.serve.catalogue.load_metrics import LoadMetrics, catalogue_gauges
from modelmill.serve.catalogue.managed_model import EngineInstance, Lease, ManagedModel
from modelmill.serve.catalogue.model_loader import ModelLoader, ModelLoadFailed
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.engine_state import QueueFull, ServerShuttingDown

_log = log.get_logger("serve")
MAX_PRELOADED_TOKENIZERS = 8
"""Models whose tokenizers are read at the start; all of a large catalogue would take memory."""
CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]


@dataclass(eq=False)
class _LoadWaiter:
    """A request that waits for its model; without ``wants_lease`` it only waits for the load."""

    model: ManagedModel
    future: asyncio.Future[Lease | None]
    wants_lease: bool = True


@dataclass
class ModelManager:
    """Loads models for requests, unloads idle ones, and gives out leases.

    Attributes:
        models: of the catalogue, in its order.
        loader: loads and unloads.
        max_waiting: requests that may wait for loads.
        on_replace: called with the old and the new client of a model that was reloaded.
        make_engine: makes a client for a model that is reloaded.
        clock: seconds, for expiry.
        call_later: as of the event loop; None: that of the running loop.
    """

    models: list[ManagedModel]
    loader: ModelLoader
    max_waiting: int
    make_engine: Callable[[ManagedModel, Manifest], EngineClient]
    on_replace: Callable[[EngineClient, EngineClient], None] = lambda _, __: None
    on_removed: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    call_later: CallLater | None = None
    _waiters: list[_LoadWaiter] = field(default_factory=list, init=False)
    _waiter_added: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _closing: bool = field(default=False, init=False)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        for model in self.models:
            self.loader.add_model(model)
        self.loader.set_sleep_callback(self._start_expiry_timer)

    def set_metrics(self, metrics: LoadMetrics) -> None:
        """Count in these metrics from now on."""
        self.loader.set_metrics(metrics)

    def set_replace_callback(
        self, on_replace: Callable[[EngineClient, EngineClient], None]
    ) -> None:
        """Call ``on_replace`` with the old and the new client of a model that was reloaded."""
        self.on_replace = on_replace

    def set_removed_callback(self, on_removed: Callable[[str], None]) -> None:
        """Call ``on_removed`` with the name of a model that is gone, after its last request."""
        self.on_removed = on_removed

    # -- start and end

    async def run(self) -> None:
        """Load the pinned models, then load for requests, until cancelled."""
        for model in self.models:
            if model.pinned:
                self._add_waiter(model, wants_lease=False)
        self._start_background_task(self._preload_tokenizers())
        while True:
            self._waiters = [each for each in self._waiters if not each.future.done()]
            if not self._waiters:
                self._waiter_added.clear()
                await self._waiter_added.wait()
                continue
            await self._make_ready_and_grant(self._waiters[0].model)

    async def _preload_tokenizers(self) -> None:
        """Read tokenizers before the first requests, one after another while nothing loads."""
        for model in self.models[:MAX_PRELOADED_TOKENIZERS]:
            if self._closing or self._waiters:
                return  # a load reads its own
            with contextlib.suppress(ModelmillError):  # the load says what is wrong
                await asyncio.to_thread(model.engine.preload_text_processor)

    def reject_pending_and_future_loads(self) -> None:
        """Refuse the requests that wait, and all that come later: the server is being shut down."""
        self._closing = True
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_exception(ServerShuttingDown("the server is shutting down"))
        self.loader.wake_waiting_loads_and_drains()

    async def close(self) -> None:
        """End all workers; requests that still wait are refused."""
        self.reject_pending_and_future_loads()
        await self.loader.close(self.models)

    async def _make_ready_and_grant(self, model: ManagedModel) -> None:
        """Make a model ready and let its requests go on, or refuse them with the reason."""
        try:
            await self._make_ready(model)
        except ModelmillError as error:
            self._reject_waiters(model, error)
        except Exception as error:
            _log.exception("bug", extra={"data": {"model": model.name}})
            self._reject_waiters(model, error)
        else:
            for waiter in self._waiters_for_model(model):
                waiter.future.set_result(self._grant_lease(model) if waiter.wants_lease else None)
            if model.instance is not None and not model.instance.leases:
                self._start_expiry_timer(model)

    async def _make_ready(self, model: ManagedModel) -> None:
        """Load or wake a model unless it is ready; wait for one that is unloaded or restarts.

        Raises:
            ModelLoadFailed: it cannot be loaded.
        """
        while not self._closing:
            instance = model.instance
            if instance is not None and instance.is_available:
                return
            if model.unloading is not None:
                await asyncio.shield(model.unloading)
            elif instance is not None and not instance.is_sleeping:
                await self._wait_for_restart(instance)
            elif not self._waiters_for_model(model):
                return
            elif instance is not None:
                await self.loader.wake_up(model, lambda: bool(self._waiters_for_model(model)))
            else:
                await self.loader.load(model, lambda: bool(self._waiters_for_model(model)))
        raise ServerShuttingDown("the server is shutting down")

    async def _wait_for_restart(self, instance: EngineInstance) -> None:
        """Wait until a worker that restarts is ready or given up."""
        assert instance.task is not None
        instance.engine.state_changed.clear()
        ready = asyncio.ensure_future(instance.engine.state_changed.wait())
        try:
            await asyncio.wait((instance.task, ready), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()

    def _reject_waiters(self, model: ManagedModel, error: BaseException) -> None:
        for waiter in self._waiters_for_model(model):
            waiter.future.set_exception(error)

    def _waiters_for_model(self, model: ManagedModel) -> list[_LoadWaiter]:
        return [each for each in self._waiters if each.model is model and not each.future.done()]

    # -- requests

    def engine_clients_by_name(self) -> dict[str, EngineClient]:
        """The clients by every name that the catalogue gives them."""
        return {
            name: each.engine for each in self.models for name in (each.name, *each.entry.aliases)
        }

    def find_model_by_client(self, engine: EngineClient) -> ManagedModel | None:
        """The model with this client; None for an engine that is always loaded."""
        return next((each for each in self.models if each.engine is engine), None)

    async def acquire_lease(self, model: ManagedModel, keep_alive: float | None = None) -> Lease:
        """Wait until a model is loaded, and keep it loaded until the lease is released.

        Args:
            model: of this catalogue.
            keep_alive: seconds that it stays loaded unused, until it is unloaded or another
                request says otherwise; None: unchanged.

        Raises:
            ModelLoadFailed: it cannot be loaded.
            QueueFull: too many requests wait.
            ServerShuttingDown: the server is being shut down.
        """
        lease = None
        if model.instance is not None and model.instance.is_available and not self._closing:
            lease = self._grant_lease(model)
        else:
            lease = await self._await_waiter(self._enqueue_waiter(model))
            assert lease is not None
        if keep_alive is not None:
            model.set_keep_alive(keep_alive)
        return lease

    def _enqueue_waiter(self, model: ManagedModel, *, wants_lease: bool = True) -> _LoadWaiter:
        if self._closing:
            raise ServerShuttingDown("the server is shutting down")
        if sum(not each.future.done() for each in self._waiters) >= self.max_waiting:
            raise QueueFull(f"{self.max_waiting} requests wait for models to load; try again soon")
        return self._add_waiter(model, wants_lease)

    def _add_waiter(self, model: ManagedModel, wants_lease: bool) -> _LoadWaiter:
        future = asyncio.get_running_loop().create_future()
        # a request that has left never looks at its error
        future.add_done_callback(lambda each: each.cancelled() or each.exception())
        waiter = _LoadWaiter(model, future, wants_lease)
        self._waiters.append(waiter)
        self._waiter_added.set()
        return waiter

    async def _await_waiter(self, waiter: _LoadWaiter) -> Lease | None:
        try:
            return await waiter.future
        except asyncio.CancelledError:
            granted = waiter.future.done() and not waiter.future.cancelled()
            if granted and waiter.future.exception() is None:
                lease = waiter.future.result()
                if lease is not None:
                    lease.release()
            waiter.future.cancel()
            self.loader.wake_waiting_loads_and_drains()
            raise

    def _grant_lease(self, model: ManagedModel) -> Lease:
        instance = model.instance
        assert instance is not None
        instance.adjust_lease_count(1)
        model.record_last_use(self.clock())
        model.cancel_expiry_timer()
        return Lease(instance, lambda: self._release_lease(model, instance))

    def _release_lease(self, model: ManagedModel, instance: EngineInstance) -> None:
        instance.adjust_lease_count(-1)
        model.record_last_use(self.clock())
        self.loader.wake_waiting_loads_and_drains()
        if not instance.leases and model.instance is instance and not instance.draining:
            self._start_expiry_timer(model)

    # -- expiry

    def _start_expiry_timer(self, model: ManagedModel) -> None:
        """Unload a model that nothing uses after its idle time."""
        model.cancel_expiry_timer()
        seconds = model.idle_timeout
        if self._closing or math.isinf(seconds):
            return
        if seconds <= 0:
            self._unload_if_idle(model)
            return
        call_later = self.call_later or asyncio.get_running_loop().call_later
        timer = call_later(seconds, lambda: self._unload_if_idle(model))
        model.set_expiry_timer(self.clock() + seconds, timer)

    def _unload_if_idle(self, model: ManagedModel) -> None:
        model.cancel_expiry_timer()
        if model.instance is not None and not model.instance.leases and not self._closing:
            self._start_background_task(self.loader.unload(model, "idle"))

    def _start_background_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- models that come and go

    def add_model(self, model: ManagedModel) -> None:
        """Serve one more model, which is not loaded."""
        self.models.append(model)
        self.loader.add_model(model)
        if model.pinned:
            self._add_waiter(model, wants_lease=False)

    def remove_model(self, model: ManagedModel) -> None:
        """Serve a model no longer: requests that wait are refused, running ones end first."""
        self.models.remove(model)
        self.loader.forget_model(model)
        model.cancel_expiry_timer()
        self._reject_waiters(model, ModelLoadFailed(f"the model {model.name} was removed"))
        self._start_background_task(self._unload_removed_model(model))

    async def _unload_removed_model(self, model: ManagedModel) -> None:
        await self.loader.unload(model, "removed")
        if all(each.name != model.name for each in self.models):  # not there again
            self.on_removed(model.name)

    # -- administration

    async def load(self, model: ManagedModel) -> None:
        """Load a model, in turn with the requests that wait.

        Raises:
            ModelLoadFailed: it cannot be loaded.
            QueueFull: too many requests wait.
        """
        if model.instance is None or not model.instance.is_available:
            await self._await_waiter(self._enqueue_waiter(model, wants_lease=False))

    def start_load(self, model: ManagedModel) -> None:
        """Load a model in the background; ``ManagedModel.error`` says why it failed.

        Raises:
            QueueFull: too many requests wait.
        """
        is_queued = any(not each.wants_lease for each in self._waiters_for_model(model))
        if model.state not in ("loading", "loaded") and not is_queued:
            self._enqueue_waiter(model, wants_lease=False)

    async def unload(self, model: ManagedModel) -> None:
        """Unload a model once the requests that use it have ended."""
        if model.instance is not None:
            await self.loader.unload(model, "request")

    def pin(self, model: ManagedModel, pinned: bool) -> None:
        """Keep a model loaded, or let it expire and be unloaded again."""
        model.set_pinned(pinned)
        if model.instance is not None and not model.instance.leases:
            self._start_expiry_timer(model)

    def start_reload(self, model: ManagedModel) -> asyncio.Task[None]:
        """Start ``reload`` as a task that goes on if nothing waits for it."""
        return self._start_background_task(self.reload(model))

    async def reload(self, model: ManagedModel) -> None:
        """Load the changed files of a model; no request is lost.

        A second worker is started beside the first, which answers its requests to their end. Where
        both do not fit the memory budget, the first is unloaded before, and requests wait.

        Raises:
            ModelLoadFailed: it cannot be loaded.
            UsageError: it is not loaded, or about to be unloaded.
        """
        old = model.instance
        if old is None or not old.is_available:
            raise UsageError(
                f"the model {model.name} is {model.state}; its files are read when it is loaded"
            )
        try:
            manifest = model.reread_manifest()
        except ModelmillError as error:
            raise ModelLoadFailed(f"the model {model.name} cannot be loaded: {error}") from None
        if not self.loader.fits_memory_budget(model.planned_bytes):
            await self.loader.unload(model, "reload")
            model.engine.replace_manifest(manifest)
            await self.load(model)
            return
        model.cancel_expiry_timer()
        try:
            new = await self.loader.load_replacement(model, self.make_engine(model, manifest))
        except ModelLoadFailed:
            if model.instance is old and not old.leases:
                self._start_expiry_timer(model)
            raise
        if model.instance is not old or self._closing:  # it was unloaded meanwhile
            await self.loader.drain_and_end_worker(new)
            return
        self._swap_instances(model, old, new)
        await self.loader.drain_and_end_worker(old)

    def _swap_instances(
        self, model: ManagedModel, old: EngineInstance, new: EngineInstance
    ) -> None:
        model.cancel_expiry_timer()
        model.attach_instance(new)
        old.set_draining(True)
        self.loader.metrics.record_unload(model.name, "reload")
        self.on_replace(old.engine, new.engine)
        self._start_expiry_timer(model)

    # -- what is shown

    def num_waiting(self, model: ManagedModel) -> int:
        """Requests that wait until the model is loaded."""
        return len(self._waiters_for_model(model))

    def metric_families(self) -> Iterable[Metric]:
        """Gauges for /metrics."""
        states = [
            (each.name, self.state_for_clients(each), self.num_waiting(each))
            for each in self.models
        ]
        loader = self.loader
        return catalogue_gauges(
            states, loader.used_bytes, loader.budget_bytes, loader.sleeping_bytes
        )

    def state_for_clients(self, model: ManagedModel) -> str:
        """The model's state; "loading" also while its requests wait for their turn to load it."""
        is_queued = model.state in ("unloaded", "sleeping") and self.num_waiting(model) > 0
        return "loading" if is_queued else model.state

    def seconds_to_expiry(self, model: ManagedModel) -> float:
        """Seconds until an unused model is unloaded; infinite: it is not."""
        if model.expires_at is None:
            return model.idle_timeout
        return max(model.expires_at - self.clock(), 0.0)


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
