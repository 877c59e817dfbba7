"""Loads and unloads the models of a catalogue within a memory budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from modelmill.core import log
from modelmill.core.byte_size import format_bytes
from modelmill.core.errors import ArtifactError, ModelmillError
from modelmill.serve.catalogue.load_metrics import LoadMetrics
from modelmill.serve.catalogue.managed_model import EngineInstance, ManagedModel
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.engine_state import EngineState
from modelmill.serve.segmentation_messages import SEGMENTATION_ENGINE_TYPE

_log = log.get_logger("serve")


class ModelLoadFailed(ModelmillError):
    """A model of the catalogue cannot be loaded; the text says why in one line."""


class ModelLoader:
    """Starts and ends the workers of models; one load at a time."""

    def __init__(
        self,
        budget_bytes: int | None,
        *,
        fixed_bytes: Callable[[], int] = lambda: 0,
        sleep_bytes: int = 0,
    ) -> None:
        """Start with no model loaded.

        Args:
            budget_bytes: memory of all engines together; None: no limit.
            fixed_bytes: memory of the engines that are always loaded.
            sleep_bytes: memory of the host for the weights of engines that sleep instead of being
                unloaded; 0: none does.
        """
        self.budget_bytes = budget_bytes
        self.metrics = LoadMetrics()
        self._fixed_bytes, self.sleep_bytes = fixed_bytes, sleep_bytes
        self._on_sleep: Callable[[ManagedModel], None] = lambda _: None
        self._models: list[ManagedModel] = []
        self._instances: list[EngineInstance] = []
        self._changed = asyncio.Event()

    def add_model(self, model: ManagedModel) -> None:
        """Manage one more model."""
        self._models.append(model)
        self.metrics.add_model(model.name)

    def forget_model(self, model: ManagedModel) -> None:
        """Manage a model no longer; its worker is unloaded by the caller."""
        self._models.remove(model)

    def set_metrics(self, metrics: LoadMetrics) -> None:
        """Count in these metrics from now on."""
        self.metrics = metrics
        for model in self._models:
            metrics.add_model(model.name)

    @property
    def used_bytes(self) -> int:
        """Memory of all workers, also of those that are being loaded or unloaded."""
        return self._fixed_bytes() + sum(each.nbytes for each in self._instances)

    @property
    def sleeping_bytes(self) -> int:
        """Memory of the host that the weights of sleeping engines take."""
        return sum(each.host_bytes for each in self._instances)

    def set_sleep_callback(self, on_sleep: Callable[[ManagedModel], None]) -> None:
        """Call ``on_sleep`` with each model that was put to sleep."""
        self._on_sleep = on_sleep

    def wake_waiting_loads_and_drains(self) -> None:
        """Let a load that waits for room look again: a request has ended or left."""
        self._changed.set()

    # -- load

    async def load(self, model: ManagedModel, is_needed: Callable[[], bool]) -> None:
        """Load a model, after others were unloaded to make room.

        Args:
            model: unloaded.
            is_needed: whether any request still waits for it; without any, waiting for room ends.

        Raises:
            ModelLoadFailed: it does not fit, cannot be opened, or is not needed any more.
        """
        try:
            if model.has_changed_files:
                model.engine.replace_manifest(model.reread_manifest())
        except ArtifactError as error:
            raise self._record_and_make_load_failure(model, str(error)) from None
        await self._make_memory_room(model, model.planned_bytes, is_needed)
        model.engine.prepare_rerun()
        await self._start_worker(model, model.engine)

    async def load_replacement(self, model: ManagedModel, engine: EngineClient) -> EngineInstance:
        """Load another worker of a loaded model beside it; the caller swaps and drains.

        Raises:
            ModelLoadFailed: it cannot be opened.
        """
        return await self._start_worker(model, engine)

    def fits_memory_budget(self, nbytes: int) -> bool:
        """Whether so much more memory is within the budget."""
        return self.budget_bytes is None or self.used_bytes + nbytes <= self.budget_bytes

    async def _start_worker(self, model: ManagedModel, engine: EngineClient) -> EngineInstance:
        """Start a worker and wait until it is ready.

        Raises:
            ModelLoadFailed: it does not become ready.
        """
        started = time.perf_counter()
        instance = EngineInstance(engine, model.planned_bytes)
        if model.instance is None:
            model.attach_instance(instance)
        self._instances.append(instance)
        engine.start_text_processor_preload()
        task = asyncio.create_task(self._supervise_worker(model, instance))
        instance.set_task(task)
        _log.info("model loading", extra={"data": {"model": model.name}})
        await engine.load_finished.wait()
        seconds = time.perf_counter() - started
        if engine.state is not EngineState.READY:
            await task
            raise self._record_and_make_load_failure(model, engine.error or "its worker ended")
        instance.set_memory_bytes(model.loaded_bytes(engine))
        model.record_loaded_bytes(instance.nbytes)
        self.metrics.record_load(model.name, seconds)
        data = {"model": model.name, "seconds": round(seconds, 3), "bytes": instance.nbytes}
        _log.info("model loaded", extra={"data": data})
        return instance

    async def _supervise_worker(self, model: ManagedModel, instance: EngineInstance) -> None:
        """Run a worker to its end, restarts included."""
        engine = instance.engine
        try:
            await engine.supervise_worker()
        finally:
            self._instances.remove(instance)
            if model.instance is instance:
                model.detach_instance()
            if model.engine is engine:
                engine.mark_unloaded()
            self.wake_waiting_loads_and_drains()

    def _record_and_make_load_failure(self, model: ManagedModel, reason: str) -> ModelLoadFailed:
        model.record_load_error(reason)
        self.metrics.record_failure(model.name)
        _log.error("model failed to load", extra={"data": {"model": model.name, "reason": reason}})
        return ModelLoadFailed(f"the model {model.name} cannot be loaded: {reason}")

    # -- room

    async def _make_memory_room(
        self, model: ManagedModel, nbytes: int, is_needed: Callable[[], bool]
    ) -> None:
        """Unload others, least recently used first, until ``nbytes`` fit the budget.

        Raises:
            ModelLoadFailed: they can never fit, or the model is not needed any more.
        """
        if self.budget_bytes is None:
            return
        kept = self._fixed_bytes() + sum(
            each.planned_bytes for each in self._models if each.pinned and each is not model
        )
        if kept + nbytes > self.budget_bytes:
            beside = f" beside {format_bytes(kept)} of pinned engines" if kept else ""
            raise self._record_and_make_load_failure(
                model,
                f"it needs {format_bytes(nbytes)}{beside}, and --memory-budget is "
                f"{format_bytes(self.budget_bytes)}",
            )
        while not self.fits_memory_budget(nbytes):
            victim = self._choose_eviction_victim(model)
            if victim is not None:
                await self._drain_and_evict(victim, model, is_needed)
            elif self._instances:  # one that is being loaded, reloaded or unloaded
                self._changed.clear()
                await self._changed.wait()
            else:
                return
            if not is_needed():
                raise ModelLoadFailed(f"the model {model.name} is not needed any more")

    def _choose_eviction_victim(self, model: ManagedModel) -> ManagedModel | None:
        """The model to unload next: an idle one if there is any, else one that answers.

        One that sleeps is the last: it has given nearly all of its memory back.
        """
        loaded = [
            (each.instance.is_sleeping, each.instance.leases > 0, each.last_used, number, each)
            for number, each in enumerate(self._models)
            if each.instance is not None
            and not (each is model or each.pinned or each.instance.draining)
        ]
        return min(loaded)[-1] if loaded else None

    async def _drain_and_evict(
        self, victim: ManagedModel, model: ManagedModel, is_needed: Callable[[], bool]
    ) -> None:
        """Put a model to sleep or unload it once its requests have ended, in favour of ``model``.

        Gives up when that is not needed any more.
        """
        instance = victim.instance
        assert instance is not None
        instance.set_draining(True)
        while instance.leases and is_needed():
            self._changed.clear()
            await self._changed.wait()
        if instance.leases:
            instance.set_draining(False)
            return
        if instance.is_sleeping or not await self._try_put_to_sleep(victim, instance, model):
            await self.unload(victim, "memory")

    # -- sleep

    async def wake_up(self, model: ManagedModel, is_needed: Callable[[], bool]) -> None:
        """Wake a sleeping model up, after others made room; unload it if that is impossible.

        Args:
            model: sleeping.
            is_needed: as of ``load``.

        Raises:
            ModelLoadFailed: it does not fit, or is not needed any more.
        """
        instance = model.instance
        assert instance is not None, "a sleeping model has a worker"
        if model.has_changed_files:
            await self.unload(model, "reload")
            return
        left, host_bytes = instance.nbytes, instance.host_bytes
        await self._make_memory_room(model, model.planned_bytes - left, is_needed)
        if model.instance is not instance or not instance.is_sleeping:
            return  # it expired or ended meanwhile
        started = time.perf_counter()
        instance.set_memory_bytes(model.planned_bytes, host_bytes)
        try:
            await instance.engine.wake_up()
        except ModelmillError as error:
            reason = {"model": model.name, "reason": str(error)}
            _log.warning("model does not wake up", extra={"data": reason})
            await self.unload(model, "memory")
            return
        seconds = time.perf_counter() - started
        instance.set_memory_bytes(model.planned_bytes)
        self.metrics.record_wake(model.name, seconds)
        data = {"model": model.name, "seconds": round(seconds, 3), "bytes": instance.nbytes}
        _log.info("model awake", extra={"data": data})

    async def _try_put_to_sleep(
        self, model: ManagedModel, instance: EngineInstance, successor: ManagedModel
    ) -> bool:
        """Let a draining model without requests sleep; whether it does.

        The model that takes its memory, ``successor``, is not unloaded for it.
        """
        engine = instance.engine
        nbytes = 0 if engine.manifest is None else engine.manifest.weight_bytes
        can_sleep = (
            engine.engine_type != SEGMENTATION_ENGINE_TYPE and engine.state is EngineState.READY
        )
        if not can_sleep or model.has_changed_files:
            return False
        if not await self._try_make_host_memory_room(nbytes, successor):
            return False
        started = time.perf_counter()
        try:
            reply = await engine.sleep()
        except ModelmillError as error:
            reason = {"model": model.name, "reason": str(error)}
            _log.warning("model does not sleep", extra={"data": reason})
            return False
        instance.set_memory_bytes(reply.device_bytes, reply.host_bytes)
        instance.set_draining(model.unloading is not None)
        self.metrics.record_sleep(model.name)
        seconds = round(time.perf_counter() - started, 3)
        data = {"model": model.name, "seconds": seconds, "host_bytes": reply.host_bytes}
        _log.info("model sleeps", extra={"data": data})
        self._on_sleep(model)
        return True

    async def _try_make_host_memory_room(self, nbytes: int, successor: ManagedModel) -> bool:
        """Unload sleeping models, least recently used first, for the weights of another.

        Pinned ones stay, and ``successor``, which is about to wake up.

        Returns:
            Whether they fit.
        """
        if nbytes > self.sleep_bytes:
            return False
        while self.sleeping_bytes + nbytes > self.sleep_bytes:
            sleeping = [
                (each.last_used, number, each)
                for number, each in enumerate(self._models)
                if each.instance is not None
                and each.instance.is_sleeping
                and not (each is successor or each.pinned)
            ]
            if not sleeping:
                return False
            await self.unload(min(sleeping)[-1], "memory")
        return True

    # -- unload

    async def unload(self, model: ManagedModel, reason: str) -> None:
        """Unload a model once its requests have ended; does nothing if it is not loaded.

        Args:
            model: to unload.
            reason: of the log and the metrics: "idle", "memory", "request" or "removed".
        """
        instance = model.instance
        if instance is None:
            return
        instance.set_draining(True)
        unloading = model.unloading
        if unloading is None:
            unloading = asyncio.create_task(self._drain_and_unload(model, instance, reason))
            model.set_unload_task(unloading)
        await asyncio.shield(unloading)

    async def _drain_and_unload(
        self, model: ManagedModel, instance: EngineInstance, reason: str
    ) -> None:
        try:
            seconds = await self.drain_and_end_worker(instance)
        finally:
            model.set_unload_task(None)
        self.metrics.record_unload(model.name, reason)
        data = {"model": model.name, "reason": reason, "seconds": round(seconds, 3)}
        _log.info("model unloaded", extra={"data": data})

    async def drain_and_end_worker(self, instance: EngineInstance) -> float:
        """End a draining worker after its last request; return the seconds that ending took."""
        while instance.leases:
            self._changed.clear()
            await self._changed.wait()
        started = time.perf_counter()
        assert instance.task is not None
        await instance.engine.close()
        await instance.task
        return time.perf_counter() - started

    async def close(self, models: Sequence[ManagedModel]) -> None:
        """End all workers now, with their requests."""
        for model in models:
            model.cancel_expiry_timer()
        running = list(self._instances)
        for instance in running:
            await instance.engine.close()
        tasks = [each.task for each in running if each.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
