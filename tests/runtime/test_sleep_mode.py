"""Sleep and wake_up: the same tokens before and after, at the same addresses, without KV pages.

On a CPU the memory is really given back: pages that were dropped read as zeros. What only a GPU
shows is marked ``gpu``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.async_llm import AsyncLLM
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import CapacityError, RequestError, UsageError
from modelmill.core.types import SamplingParams, SleepOrWakeReport
from modelmill.llm import LLM, build_engine
from modelmill.loader import sleepable_memory
from modelmill.loader.reachable_tensors import reachable_tensors
from modelmill.runtime import sleep_mode
from modelmill.runtime.engine_core import EngineCore
from modelmill.runtime.sleep_mode import sleep, wake_up
from tests.models import tiny_models
from tests.models.all_families import CASES
from tests.runtime import tiny

PROMPT = tiny.prompts(1, 40, 40)[0]


def answer(core: EngineCore) -> tuple[list[Any], int]:
    """(ids with their log-probabilities, cached tokens) of an answer."""
    params = tiny.params(max_tokens=9, logprobs=5, ignore_eos=True)
    core.add(tiny.requests([PROMPT], params, eos=())[0])
    events = [event for event in tiny.drain(core) if event.token_id is not None]
    return [(event.token_id, event.logprobs) for event in events], events[-1].cached_tokens


def addresses(core: EngineCore) -> list[int]:
    """Where weights and KV cache lie."""
    runner = core.model_runner
    held_by_model = reachable_tensors([runner.model, runner.fused_model])
    return [each.data_ptr() for each in (*held_by_model, *runner.kv.tensors)]


def assert_sleeps_and_wakes(core: EngineCore) -> None:
    """Twice: the answer is the same, computed anew, at the same addresses."""
    first, _ = answer(core)
    before = addresses(core)
    for _ in range(2):
        report = sleep(core)
        assert report.host_bytes > 0
        assert core.stats().cached_pages == core.stats().snapshots == 0
        woken = wake_up(core)
        assert woken.host_bytes == 0
        assert addresses(core) == before
        assert answer(core) == (first, 0)
        tiny.assert_idle(core)


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}])
def test_the_same_answer_after_sleep(options: dict[str, Any]) -> None:
    assert_sleeps_and_wakes(tiny.make_engine(enable_sleep_mode=True, **options))


def test_a_recurrent_state_sleeps_too() -> None:
    assert_sleeps_and_wakes(tiny.make_engine(tiny.hybrid(), enable_sleep_mode=True))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_families_sleep(tmp_path: Path, name: str, quantization: str) -> None:
    """Also experts, whose weights a second tree of modules stacks."""
    engine = build(tmp_path, name, quantization)
    config = RunConfig(device="cpu", kv_cache_bytes=1 << 21, page_size=8, enable_sleep_mode=True)
    assert_sleeps_and_wakes(EngineCore.open(engine, config))


def test_two_ranks_sleep(tmp_path: Path) -> None:
    engine = build(tmp_path, "llama", "none")
    config = RunConfig(
        device="cpu", tp=2, threads=1, kv_cache_bytes=1 << 21, page_size=8, enable_sleep_mode=True
    )
    core = EngineCore.open(engine, config)
    try:
        assert_sleeps_and_wakes(core)
    finally:
        core.close()


def build(folder: Path, name: str, quantization: str) -> Path:
    """A tiny engine of a family."""
    if name in CASES:
        CASES[name].save(folder / "checkpoint")
    else:
        tiny_models.save_hf(name, folder / "checkpoint")
    config = BuildConfig(dtype="float32", target="cpu", quantization=quantization)
    build_engine(folder / "checkpoint", folder / "engine", config, check=False, tune=False)
    return folder / "engine"


def test_a_sleeping_engine_has_no_weights() -> None:
    """Its memory was given back, so the tensors are zeros until it wakes up."""
    core = tiny.make_engine(enable_sleep_mode=True)
    weight = core.model_runner.model.get_submodule("embed").weight
    assert isinstance(weight, torch.Tensor)
    assert weight.abs().sum() > 0
    total = sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
                 for each in reachable_tensors([core.model])}.values())  # fmt: skip
    assert sleep(core).host_bytes <= total
    assert weight.abs().sum() == 0
    assert all(not each.view(torch.uint8).any() for each in core.model_runner.kv.tensors)
    wake_up(core)
    assert weight.abs().sum() > 0


def test_sleeping_and_waking_twice_change_nothing() -> None:
    core = tiny.make_engine(enable_sleep_mode=True)
    assert wake_up(core).host_bytes == 0
    host_bytes = sleep(core).host_bytes
    assert sleep(core).host_bytes == host_bytes > 0
    wake_up(core)
    assert wake_up(core).host_bytes == 0


def test_what_is_refused() -> None:
    core = tiny.make_engine()
    with pytest.raises(UsageError, match=r"^the engine was opened without sleep mode; give"):
        sleep(core)
    with pytest.raises(UsageError, match="without sleep mode"):
        wake_up(core)
    core = tiny.make_engine(enable_sleep_mode=True)
    core.add(tiny.requests([PROMPT])[0])
    with pytest.raises(UsageError, match=r"^the engine has requests; it can sleep once they have"):
        sleep(core)
    tiny.drain(core)
    sleep(core)
    with pytest.raises(RequestError, match=r"^the engine sleeps; wake it up first$"):
        core.add(tiny.requests([PROMPT])[0])
    with pytest.raises(RequestError, match=r"^the engine sleeps; wake it up first$"):
        core.add_all(tiny.requests([PROMPT]))
    wake_up(core)
    assert answer(core)[0]


def test_a_full_host_leaves_the_engine_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    core = tiny.make_engine(enable_sleep_mode=True)
    expected, _ = answer(core)

    def full(_: object) -> int:
        raise CapacityError("the host has no memory left to pin (cuMemHostAlloc)")

    monkeypatch.setattr(sleepable_memory.CpuRegion, "offload", full)
    with pytest.raises(CapacityError, match="no memory left to pin"):
        sleep(core)
    events, cached = answer(core)
    assert [id for id, _ in events] == [id for id, _ in expected]
    assert cached == 32, "the prefix cache stays, too"


def test_the_python_api_sleeps(tmp_path: Path) -> None:
    engine = build(tmp_path, "llama", "none")
    with LLM(engine, device="cpu", kv_cache_bytes=1 << 21, enable_sleep_mode=True) as llm:
        assert llm.sleep().host_bytes > 0
        assert llm.wake_up().host_bytes == 0
    with LLM(engine, device="cpu", kv_cache_bytes=1 << 21) as llm, pytest.raises(UsageError):
        llm.sleep()


def test_the_asyncio_api_sleeps(tmp_path: Path) -> None:
    engine = build(tmp_path, "llama", "none")
    options: dict[str, Any] = {"device": "cpu", "kv_cache_bytes": 1 << 21}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7]}

    async def main() -> None:
        async with AsyncLLM(engine, enable_sleep_mode=True, **options) as llm:
            before = await llm.generate(prompt, params)
            assert (await llm.sleep()).host_bytes > 0
            with pytest.raises(RequestError, match="the engine sleeps"):
                await llm.generate(prompt, params)
            assert (await llm.wake_up()).host_bytes == 0
            after = await llm.generate(prompt, params)
            assert after.outputs[0].token_ids == before.outputs[0].token_ids
        with pytest.raises(UsageError, match="is closed"):
            await llm.sleep()

    asyncio.run(main())


@pytest.mark.parametrize("starts", [False, True])
def test_an_asyncio_call_that_is_cancelled_harms_nothing(
    tmp_path: Path, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it starts, or while it runs, as by ``asyncio.wait_for``."""
    engine = build(tmp_path, "llama", "none")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    has_started, may_end = threading.Event(), threading.Event()

    def slow_wake_up(core: EngineCore) -> SleepOrWakeReport:
        has_started.set()
        may_end.wait()
        return wake_up(core)

    async def main() -> list[int]:
        async with AsyncLLM(engine, enable_sleep_mode=True, device="cpu") as llm:
            monkeypatch.setattr(sleep_mode, "wake_up", slow_wake_up)
            running = asyncio.ensure_future(llm.wake_up())
            await asyncio.to_thread(has_started.wait)
            task = running if starts else asyncio.ensure_future(llm.wake_up())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            may_end.set()
            answer = await llm.generate({"prompt_token_ids": [5, 6, 7]}, params)
            return list(answer.outputs[0].token_ids)

    assert len(asyncio.run(asyncio.wait_for(main(), 50))) == 4


@pytest.fixture
def on_gpu(tmp_path: Path) -> Callable[..., EngineCore]:
    """Opens an engine on the GPU, in sleep mode and warmed up: with CUDA graphs."""

    def make(name: str) -> EngineCore:
        config = RunConfig(
            device="cuda", kv_cache_bytes=1 << 26, max_num_seqs=4, enable_sleep_mode=True
        )
        core = EngineCore.open(build(tmp_path, name, "none"), config)
        core.warm_up()
        return core

    return make


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_5_text"])
def test_a_gpu_sleeps_and_its_graphs_stay(on_gpu: Callable[..., EngineCore], name: str) -> None:
    """The same tokens; how fast it wakes up, benchmarks/sleep_mode.py says.

    Other processes may use the GPU: its free memory says nothing here.
    """
    core = on_gpu(name)
    graphs: Any = core.model_runner.decode_graphs
    captured = dict(graphs._graphs)
    assert captured
    first, _ = answer(core)
    before = addresses(core)
    memory: Any = core.model_runner.memory
    regions = [*memory._weights, *memory._caches]
    assert all(region._addresses.mapped for region in regions)
    sleep(core)
    assert not any(region._addresses.mapped for region in regions)
    wake_up(core)
    assert all(region._addresses.mapped for region in regions)
    assert addresses(core) == before
    assert answer(core) == (first, 0)
    assert {key: graphs._graphs[key] for key in captured} == captured
