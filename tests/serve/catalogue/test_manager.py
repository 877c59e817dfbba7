"""Models that are loaded for requests: order, expiry, the memory budget, failures, reloads."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.errors import UsageError
from modelmill.serve.catalogue.manager import cancel_and_wait
from modelmill.serve.catalogue.model_loader import ModelLoadFailed
from modelmill.serve.engine_state import EngineState, QueueFull, ServerShuttingDown
from modelmill.serve.request_handle import WorkerLost
from tests.serve.catalogue.managed import Models, managed_models
from tests.serve.thread_worker import make_request

Check = Callable[[Models], Coroutine[Any, Any, None]]


def run(path: Path, check: Check, *names: str, **options: Any) -> None:
    """Run a check of a manager of some models."""

    async def main() -> None:
        async with managed_models(path, *(names or ("a", "b")), **options) as models:
            await check(models)

    asyncio.run(main())


async def two_want_room_for_one(models: Models) -> tuple[Any, Any]:
    """The lease of model a, which is being unloaded, and the request for b that waits for it."""
    await models.limit_to_one()
    lease = await models.manager.acquire_lease(models["a"])
    second = models.acquire("b")
    await models.until(lambda: models["a"].state == "unloading")
    return lease, second


def test_a_model_is_loaded_once_for_all_requests_that_wait(stories: Path) -> None:
    async def check(models: Models) -> None:
        models.launchers["a"].gate.clear()
        requests = [models.acquire("a") for _ in range(3)]
        await models.until(lambda: models.launchers["a"].launches)
        assert models["a"].state == "loading"
        assert models.manager.num_waiting(models["a"]) == 3
        models.launchers["a"].gate.set()
        leases = await asyncio.gather(*requests)
        assert models.launchers["a"].launches == 1
        assert models["a"].state == "loaded"
        assert {lease.engine for lease in leases} == {models["a"].engine}
        assert models["a"].instance is not None
        assert models["a"].instance.leases == 3
        assert models["b"].state == "unloaded"

    run(stories, check)


def test_an_answer_is_the_same_after_the_model_was_loaded_again(stories: Path) -> None:
    async def answer(models: Models) -> list[int]:
        lease = await models.manager.acquire_lease(models["a"])
        handle = lease.engine.submit([make_request(lease.engine, (1, 2, 3))])
        await handle.wait_until_finished()
        lease.release()
        return list(handle.request_states[0].output.outputs[0].token_ids)

    async def check(models: Models) -> None:
        first = await answer(models)
        await models.manager.unload(models["a"])
        assert models["a"].engine.state is EngineState.UNLOADED
        assert await answer(models) == first
        assert models.launchers["a"].launches == 2

    run(stories, check)


def test_models_load_in_the_order_of_the_requests(stories: Path) -> None:
    async def check(models: Models) -> None:
        order: list[str] = []
        models.launchers["a"].gate.clear()
        waiting = []
        for name in ("a", "c", "b"):
            waiting.append(models.acquire(name))
            waiting[-1].add_done_callback(lambda _, name=name: order.append(name))
            await asyncio.sleep(0)
        assert models.launchers["b"].launches == models.launchers["c"].launches == 0
        models.launchers["a"].gate.set()
        await asyncio.gather(*waiting)
        assert order == ["a", "c", "b"]

    run(stories, check, "a", "b", "c")


def test_a_request_that_leaves_while_it_waits_loads_nothing(stories: Path) -> None:
    async def check(models: Models) -> None:
        models.launchers["a"].gate.clear()
        first, second = models.acquire("a"), models.acquire("b")
        await models.until(lambda: models.launchers["a"].launches)
        second.cancel()
        models.launchers["a"].gate.set()
        (await first).release()
        assert models.manager.num_waiting(models["b"]) == 0
        (await models.manager.acquire_lease(models["a"])).release()
        assert models.launchers["b"].launches == 0

    run(stories, check)


def test_the_budget_unloads_the_least_recently_used(stories: Path) -> None:
    async def check(models: Models) -> None:
        await models.limit_to_one()
        budget = models.manager.loader.budget_bytes
        assert budget is not None
        models.manager.loader.budget_bytes = budget * 5 // 3  # of two models
        for name in ("a", "b", "a", "c"):
            (await models.manager.acquire_lease(models[name])).release()
        assert [models[name].state for name in "abc"] == ["loaded", "unloaded", "loaded"]
        assert models.manager.loader.used_bytes <= budget * 5 // 3

    run(stories, check, "a", "b", "c")


def test_a_model_in_use_is_unloaded_only_after_its_last_request(stories: Path) -> None:
    async def check(models: Models) -> None:
        lease, second = await two_want_room_for_one(models)
        late = models.acquire("a")  # it would keep the model loaded forever
        handle = lease.engine.submit([make_request(lease.engine, (1, 2, 3))])
        await handle.wait_until_finished()
        assert models.launchers["b"].launches == 0
        lease.release()
        (await second).release()
        (await late).release()
        assert models.launchers["a"].launches == 3

    run(stories, check)


def test_waiting_for_room_ends_with_the_request(stories: Path) -> None:
    async def check(models: Models) -> None:
        lease, second = await two_want_room_for_one(models)
        second.cancel()
        await models.until(lambda: models["a"].state == "loaded")
        (await models.manager.acquire_lease(models["a"])).release()
        lease.release()
        assert models.launchers["b"].launches == 0

    run(stories, check)


def test_a_pinned_model_stays_and_one_that_never_fits_is_refused(stories: Path) -> None:
    async def check(models: Models) -> None:
        await models.limit_to_one()
        (await models.manager.acquire_lease(models["a"])).release()
        models.manager.pin(models["a"], True)
        with pytest.raises(ModelLoadFailed, match=r"^the model b cannot be loaded: it needs .* "
                           r"beside .* of pinned engines, and --memory-budget is "):  # fmt: skip
            await models.manager.acquire_lease(models["b"])
        assert models["a"].state == "loaded"
        models.manager.pin(models["a"], False)
        (await models.manager.acquire_lease(models["b"])).release()

    run(stories, check)


def test_an_unused_model_expires(stories: Path) -> None:
    async def check(models: Models) -> None:
        lease = await models.manager.acquire_lease(models["a"])
        assert models.timers.seconds == []
        lease.release()
        lease.release()  # does nothing
        assert models.timers.seconds == [300.0]
        assert models["a"].expires_at is not None
        (await models.manager.acquire_lease(models["a"], keep_alive=7.0)).release()
        assert models.timers.seconds == [7.0]
        models.timers.fire()
        await models.until(lambda: models["a"].state == "unloaded")
        (await models.manager.acquire_lease(models["a"])).release()
        assert models.timers.seconds == [300.0], "the last unload forgets the keep-alive"
        (await models.manager.acquire_lease(models["a"], keep_alive=0.0)).release()
        await models.until(lambda: models["a"].state == "unloaded")

    run(stories, check, keep_alive=300.0)


def test_a_timer_does_not_end_a_model_that_is_used_again(stories: Path) -> None:
    async def check(models: Models) -> None:
        (await models.manager.acquire_lease(models["a"])).release()
        lease = await models.manager.acquire_lease(models["a"])
        models.timers.fire()
        assert models["a"].state == "loaded"
        lease.release()

    run(stories, check, keep_alive=1.0)


def test_all_that_wait_hear_why_a_model_cannot_be_loaded(stories: Path) -> None:
    async def check(models: Models) -> None:
        launcher = models.launchers["a"]
        launcher.error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        requests = [models.acquire("a") for _ in range(2)]
        for request in requests:
            with pytest.raises(ModelLoadFailed) as raised:
                await request
            assert str(raised.value) == (
                "the model a cannot be loaded: the worker of a failed: Too many open files"
            )
        assert models["a"].state == "unloaded"
        assert models["a"].error == "the worker of a failed: Too many open files"
        launcher.error = None
        (await models.manager.acquire_lease(models["a"])).release()
        assert models["a"].error is None

    run(stories, check)


def test_a_worker_that_dies_fails_its_requests_and_later_ones_wait(stories: Path) -> None:
    async def check(models: Models) -> None:
        lease = await models.manager.acquire_lease(models["a"])
        launcher = models.launchers["a"]
        launcher.children[-1].allow_steps.clear()
        handle = lease.engine.submit([make_request(lease.engine, (1, 2, 3))])
        launcher.gate.clear()
        launcher.children[-1].kill()
        with pytest.raises(WorkerLost):
            await handle.wait_until_finished()
        lease.release()
        launcher.children[-1].allow_steps.set()
        later = models.acquire("a")
        await models.until(lambda: launcher.launches == 2)
        assert not later.done()
        launcher.gate.set()
        (await later).release()
        assert models["a"].engine.restarts == 1

    run(stories, check)


def test_a_reload_answers_old_requests_with_the_old_worker(stories: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(stories, engine)

    async def check(models: Models) -> None:
        lease = await models.manager.acquire_lease(models["a"])
        manifest = engine / "manifest.json"
        manifest.write_bytes(manifest.read_bytes())
        assert models["a"].has_changed_files
        reload = asyncio.ensure_future(models.manager.reload(models["a"]))
        await models.until(lambda: models["a"].engine is not lease.engine)
        new = await models.manager.acquire_lease(models["a"])
        assert new.engine is not lease.engine
        for each in (lease, new):
            handle = each.engine.submit([make_request(each.engine, (1, 2, 3))])
            await handle.wait_until_finished()
        assert not reload.done()
        lease.release()
        await reload
        assert lease.engine.state is EngineState.STOPPED
        assert models["a"].state == "loaded"
        assert not models["a"].has_changed_files
        new.release()

    run(engine, check)


def test_changed_files_are_read_when_a_model_is_loaded_again(stories: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(stories, folder)
    manifest = folder / "manifest.json"
    content = manifest.read_bytes()

    async def check(models: Models) -> None:
        lease = await models.manager.acquire_lease(models["a"])
        processor, first = lease.engine.text_processor, lease.engine.manifest
        lease.release()
        for write in (None, content):
            await models.manager.unload(models["a"])
            if write is not None:
                manifest.write_bytes(write)
            lease = await models.manager.acquire_lease(models["a"])
            assert (lease.engine.manifest is first) == (write is None)
            assert (lease.engine.text_processor is processor) == (write is None)
            lease.release()
        await models.manager.unload(models["a"])
        manifest.write_bytes(content[:-10])
        with pytest.raises(ModelLoadFailed, match=r"^the model a cannot be loaded: .* is not JSON"):
            await models.manager.acquire_lease(models["a"])
        assert models["a"].state == "unloaded"

    run(folder, check)


def test_two_reloads_at_once_leave_one_worker(stories: Path) -> None:
    async def check(models: Models) -> None:
        (await models.manager.acquire_lease(models["a"])).release()
        await asyncio.gather(*(models.manager.reload(models["a"]) for _ in range(2)))
        assert models["a"].state == "loaded"
        assert models.manager.loader.used_bytes == models["a"].planned_bytes
        (await models.manager.acquire_lease(models["a"])).release()

    run(stories, check)


def test_a_reload_without_room_waits_for_the_old_worker(stories: Path) -> None:
    async def check(models: Models) -> None:
        await models.limit_to_one()
        lease = await models.manager.acquire_lease(models["a"])
        reload = asyncio.ensure_future(models.manager.reload(models["a"]))
        await models.until(lambda: models["a"].state == "unloading")
        request = models.acquire("a")
        lease.release()
        await reload
        (await request).release()

    run(stories, check)


def test_a_reload_that_fails_keeps_the_old_worker(stories: Path) -> None:
    async def check(models: Models) -> None:
        with pytest.raises(UsageError, match="is unloaded; its files are read when it is loaded"):
            await models.manager.reload(models["a"])
        (await models.manager.acquire_lease(models["a"])).release()
        models.launchers["a"].error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        with pytest.raises(ModelLoadFailed, match="Cannot allocate memory"):
            await models.manager.reload(models["a"])
        (await models.manager.acquire_lease(models["a"])).release()

    run(stories, check)


def test_no_more_requests_wait_than_may(stories: Path) -> None:
    async def check(models: Models) -> None:
        models.launchers["a"].gate.clear()
        models.manager.max_waiting = 2
        requests = [models.acquire("a") for _ in range(3)]
        with pytest.raises(QueueFull, match="2 requests wait for models to load"):
            await requests[2]
        models.launchers["a"].gate.set()
        for request in requests[:2]:
            (await request).release()

    run(stories, check)


def test_pinned_models_are_loaded_at_the_start(stories: Path) -> None:
    async def main() -> None:
        models = Models(stories, "a", "b", "c")
        models.manager.max_waiting = 1  # of requests
        for name in ("a", "c"):
            models.manager.pin(models[name], True)
        task = asyncio.create_task(models.manager.run())
        await models.until(lambda: models["c"].state == "loaded")
        assert [models[name].state for name in "abc"] == ["loaded", "unloaded", "loaded"]
        await models.manager.close()
        await cancel_and_wait(task)

    asyncio.run(main())


def test_the_end_of_the_server_refuses_those_that_wait(stories: Path) -> None:
    async def check(models: Models) -> None:
        models.launchers["a"].gate.clear()
        request = models.acquire("a")
        await models.until(lambda: models.launchers["a"].launches)
        models.manager.reject_pending_and_future_loads()
        with pytest.raises(ServerShuttingDown):
            await request
        with pytest.raises(ServerShuttingDown):
            await models.manager.acquire_lease(models["b"])

    run(stories, check)
