"""Models that sleep where the budget would unload them, and wake up for a request."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.errors import CapacityError
from modelmill.core.types import SleepOrWakeReport
from modelmill.runtime import sleep_mode
from modelmill.runtime.engine_core import EngineCore
from modelmill.serve import sleep_worker
from modelmill.serve.catalogue.entries import read_manifest
from modelmill.serve.catalogue.model_loader import ModelLoadFailed
from modelmill.serve.catalogue.status import model_status
from modelmill.serve.engine_state import EngineState
from tests.runtime import tiny
from tests.serve.catalogue.managed import Models, managed_models
from tests.serve.catalogue.test_catalogue_server import (
    MAX_MODEL_LEN,
    check_context_of_an_unloaded_model,
    check_keep_alive,
    check_special_tokens_are_read,
)
from tests.serve.server_process import FLAGS, ServerProcess
from tests.serve.thread_worker import ThreadWorker, make_request

Check = Callable[[Models], Coroutine[Any, Any, None]]
MANY = 1 << 40
KV_BYTES = 8_000_000
HI = [{"role": "user", "content": "Hi"}]


def make_sleeper() -> EngineCore:
    return tiny.make_engine(enable_sleep_mode=True)


def run(path: Path, check: Check, *names: str, **options: Any) -> None:
    """Run a check of models of which the budget holds one; the others may sleep."""

    settings = {"make": make_sleeper, "sleep_bytes": MANY, **options}

    async def main() -> None:
        async with managed_models(path, *(names or ("a", "b")), **settings) as models:
            await models.limit_to_one()
            await check(models)

    asyncio.run(main())


async def answer(models: Models, name: str) -> list[int]:
    """The ids of an answer."""
    lease = await models.manager.acquire_lease(models[name])
    handle = lease.engine.submit([make_request(lease.engine, (1, 2, 3))])
    await handle.wait_until_finished()
    lease.release()
    return list(handle.request_states[0].output.outputs[0].token_ids)


def weight_bytes(models: Models) -> int:
    """Of each model, as its manifest says."""
    manifest = models["a"].engine.manifest
    assert manifest is not None
    return manifest.weight_bytes


async def answer_in_turn(models: Models, *names: str) -> None:
    for name in names:
        await answer(models, name)


def states(models: Models) -> str:
    return " ".join(each.state for each in models.manager.models)


def test_two_models_take_turns_without_a_load(stories: Path) -> None:
    async def check(models: Models) -> None:
        first = await answer(models, "a")
        launches = models.launchers["a"].launches
        assert await answer(models, "b") == first
        assert states(models) == "sleeping loaded"
        shown = model_status(models["a"].engine, models.manager)
        assert (shown.state, shown.progress) == ("sleeping", 1.0)
        loader = models.manager.loader
        instance = models["a"].instance
        assert instance is not None
        assert (instance.nbytes, instance.host_bytes) == (0, loader.sleeping_bytes)
        assert loader.sleeping_bytes > 0
        assert loader.used_bytes == models["b"].planned_bytes
        for name in ("a", "b", "a"):
            assert await answer(models, name) == first
        assert states(models) == "loaded sleeping"
        assert models.launchers["a"].launches == launches
        text = {metric.name: metric for metric in models.manager.metric_families()}
        assert text["modelmill:sleeping_engine_memory_bytes"].samples[0].value > 0
        state = {
            (each.labels["model_name"], each.labels["state"]): each.value
            for each in text["modelmill:model_state"].samples
        }
        assert (state["b", "sleeping"], state["a", "sleeping"]) == (1.0, 0.0)

    run(stories, check)


def test_a_model_in_use_sleeps_after_its_last_request(stories: Path) -> None:
    async def check(models: Models) -> None:
        lease = await models.manager.acquire_lease(models["a"])
        second = models.acquire("b")
        await models.until(lambda: models["a"].state == "unloading")
        lease.release()
        (await second).release()
        assert states(models) == "sleeping loaded"

    run(stories, check)


def test_without_room_on_the_host_models_are_unloaded(stories: Path) -> None:
    async def check(models: Models) -> None:
        models.manager.loader.sleep_bytes = weight_bytes(models) - 1
        await answer_in_turn(models, "a", "b")
        assert states(models) == "unloaded loaded"

    run(stories, check)


def test_the_latest_sleepers_stay(stories: Path) -> None:
    """Room for one and a half: the one that was used longest ago is unloaded."""

    async def check(models: Models) -> None:
        loader = models.manager.loader
        await answer_in_turn(models, "a", "b")
        assert states(models) == "sleeping loaded unloaded"
        loader.sleep_bytes = weight_bytes(models) + loader.sleeping_bytes // 2
        await answer(models, "c")
        assert states(models) == "unloaded sleeping loaded"
        assert 0 < loader.sleeping_bytes <= loader.sleep_bytes

    run(stories, check, "a", "b", "c")


def test_what_is_to_wake_up_is_not_unloaded_for_the_one_that_makes_room(stories: Path) -> None:
    """The host has room for one sleeper: the first stays there until it is awake."""

    async def check(models: Models) -> None:
        loader = models.manager.loader
        expected = await answer(models, "a")
        await answer(models, "b")
        loader.sleep_bytes = max(weight_bytes(models), loader.sleeping_bytes)
        launches = models.launchers["a"].launches
        assert await answer(models, "a") == expected
        assert states(models) == "loaded unloaded"
        assert models.launchers["a"].launches == launches

    run(stories, check)


def test_a_pinned_sleeper_stays(stories: Path) -> None:
    async def check(models: Models) -> None:
        loader = models.manager.loader
        await answer_in_turn(models, "a", "b")
        loader.sleep_bytes = max(weight_bytes(models), loader.sleeping_bytes)
        loader.budget_bytes = 3 * models["a"].planned_bytes - 1
        await answer(models, "c")
        models.manager.pin(models["a"], pinned=True)
        assert states(models) == "sleeping loaded loaded unloaded"
        loader.budget_bytes = 2 * models["a"].planned_bytes
        await answer(models, "d")
        assert states(models) == "sleeping unloaded loaded loaded"

    run(stories, check, "a", "b", "c", "d")


def test_a_sleeping_worker_that_ends_slowly_is_not_asked(
    stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is gone before its process: the request waits, and loads the model."""
    is_lost, is_gone = asyncio.Event(), asyncio.Event()
    wait = ThreadWorker.wait

    async def slow_wait(worker: ThreadWorker) -> int:
        is_lost.set()
        await is_gone.wait()
        return await wait(worker)

    async def check(models: Models) -> None:
        expected = await answer(models, "a")
        await answer(models, "b")
        await models.manager.unload(models["b"])
        monkeypatch.setattr(ThreadWorker, "wait", slow_wait)
        models.launchers["a"].children[-1].kill()
        await is_lost.wait()
        pending = asyncio.ensure_future(answer(models, "a"))
        for _ in range(100):
            await asyncio.sleep(0)
        is_gone.set()
        async with asyncio.timeout(50):
            assert await pending == expected

    run(stories, check)


def test_a_sleeping_model_expires_and_can_be_unloaded(stories: Path) -> None:
    async def check(models: Models) -> None:
        await answer_in_turn(models, "a", "b")
        assert states(models) == "sleeping loaded"
        models.timers.fire()
        await models.until(lambda: states(models) == "unloaded unloaded")
        await answer_in_turn(models, "a", "b")
        await models.manager.unload(models["a"])
        assert models["a"].engine.state is EngineState.UNLOADED
        assert states(models) == "unloaded loaded"
        assert models.manager.loader.sleeping_bytes == 0

    run(stories, check, keep_alive=60)


def test_a_sleeping_worker_that_dies_is_not_restarted(stories: Path) -> None:
    """Another one would take the memory that was given back; the next request loads it."""

    async def check(models: Models) -> None:
        expected = await answer(models, "a")
        await answer(models, "b")
        launches = models.launchers["a"].launches
        models.launchers["a"].children[-1].kill()
        await models.until(lambda: states(models) == "unloaded loaded")
        assert models.launchers["a"].launches == launches
        assert await answer(models, "a") == expected
        assert models.launchers["a"].launches == launches + 1

    run(stories, check)


def test_what_cannot_sleep_is_unloaded(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(models: Models) -> None:
        await answer_in_turn(models, "a", "b")
        assert states(models) == "unloaded loaded"

    def full(_: object) -> None:
        raise CapacityError("the host has no memory left to pin (cuMemHostAlloc)")

    monkeypatch.setattr(sleep_worker, "sleep", full)
    run(stories, check)


def test_what_cannot_wake_up_is_loaded(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(models: Models) -> None:
        expected = await answer(models, "a")
        await answer(models, "b")
        launches = models.launchers["a"].launches
        assert await answer(models, "a") == expected
        assert models.launchers["a"].launches == launches + 1

    def full(_: object) -> None:
        raise CapacityError("the GPU is full (cuMemCreate)")

    monkeypatch.setattr(sleep_worker, "wake_up", full)
    run(stories, check)


def test_a_wake_up_that_never_fits_is_refused(stories: Path) -> None:
    async def check(models: Models) -> None:
        await answer_in_turn(models, "a", "b")
        models.manager.pin(models["b"], pinned=True)
        with pytest.raises(ModelLoadFailed, match="of pinned engines, and --memory-budget is"):
            await models.manager.acquire_lease(models["a"])
        assert states(models) == "sleeping loaded"

    run(stories, check)


def test_what_sleepers_still_take_counts(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs stay on a GPU: where they leave no room, the sleeper is unloaded."""

    def sleep(core: Any) -> SleepOrWakeReport:
        return replace(sleep_mode.sleep(core), device_bytes=left[0])

    async def check(models: Models) -> None:
        left[0] = models["a"].planned_bytes // 4
        await answer_in_turn(models, "a", "b")
        assert states(models) == "sleeping loaded unloaded"
        assert models.manager.loader.used_bytes == models["b"].planned_bytes + left[0]
        left[0] = models["a"].planned_bytes // 3  # with the first: more than the budget leaves
        await answer(models, "c")
        assert states(models) in ("unloaded sleeping loaded", "sleeping unloaded loaded")

    left = [0]
    monkeypatch.setattr(sleep_worker, "sleep", sleep)
    run(stories, check, "a", "b", "c")


def test_a_server_puts_models_to_sleep(stories: Path, tmp_path: Path) -> None:
    """With worker processes: health, models and metrics tell it, and the log how long it took."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.engine").symlink_to(stories)
    budget = read_manifest(stories).weight_bytes * 3 // 2 + KV_BYTES
    words: tuple[Any, ...] = (
        "--models-dir", tmp_path, "--memory-budget", budget, "--sleep-memory", "1GiB",
        "--log-level", "info", "--max-model-len", MAX_MODEL_LEN, "--parse-special",
    )  # fmt: skip
    with ServerProcess(*words, flags=FLAGS) as server:
        check_context_of_an_unloaded_model(server, "two")
        texts = []
        for name in ("one", "two", "one"):
            body = {"model": name, "messages": HI, "max_tokens": 4, "temperature": 0}
            status, reply, _ = server.request("/v1/chat/completions", body)
            assert status == 200, reply
            texts.append(reply["choices"][0]["message"]["content"])
        assert texts[0] == texts[1] == texts[2]
        shown = {each["name"]: each["state"] for each in server.request("/health")[1]["engines"]}
        assert shown == {"one": "ready", "two": "sleeping"}
        listed = {each["id"]: each["state"] for each in server.request("/v1/models")[1]["data"]}
        assert listed == {"one": "loaded", "two": "sleeping"}
        check_special_tokens_are_read(server, "one")
        check_keep_alive(server, "one")
        server.process.send_signal(signal.SIGTERM)
        code, log = server.finish()
    assert code == 0
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    (awake,) = [each for each in lines if each.get("event") == "model awake"]
    assert (awake["model"], awake["seconds"] >= 0) == ("one", True)
