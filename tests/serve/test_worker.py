"""A worker: what it reports of requests, what it rejects, and its process."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from modelmill.core.errors import CapacityError, RequestError
from modelmill.core.types import (
    MEAN_POOLING,
    FinishReason,
    Grammar,
    Request,
    SamplingParams,
    TokenOutput,
)
from modelmill.llm import LLM
from modelmill.runtime.engine_core import EngineCore
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.engine_state import EngineState
from modelmill.serve.request_handle import WorkerLost
from modelmill.serve.worker import EngineWorker
from modelmill.serve.worker_inbox import MessageChannel, ReceivedRequest, WorkerInbox
from modelmill.serve.worker_messages import (
    AbortRequest,
    AddRequest,
    Message,
    OpenEngine,
    RequestRejected,
    RequestStarted,
    StepTokens,
    encode_frame,
)
from tests.runtime import tiny
from tests.serve.thread_worker import ThreadLauncher, make_request, served_engine
from tests.wait import TIMEOUT_SECONDS

RUN = {"device": "cpu", "threads": 1, "max_num_seqs": 8}
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


class Clock:
    """time.perf_counter that the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


class Kept:
    """A wire that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.send = self.sent.append


def worked(loop: EngineCore, *incoming: Message | ReceivedRequest) -> list[Message]:
    """Run a worker with these messages until nothing is left to do; return what it sends."""
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for each in incoming:
        messages.put(each)
    step, wire = loop.step, Kept()

    def last() -> list[TokenOutput]:
        tokens = step()
        if not loop.has_work:
            messages.put(None)
        return tokens

    loop.step = last  # type: ignore[method-assign]
    EngineWorker(
        loop, cast(MessageChannel, wire), cast(WorkerInbox, SimpleNamespace(messages=messages))
    ).run()
    return wire.sent


def slow(loop: EngineCore, clock: Clock, seconds: float) -> EngineCore:
    """Every step computes for so long, by the clock."""
    run = loop.model_runner.launch_forward

    def late(plan: Any) -> Any:
        clock.now += seconds
        return run(plan)

    loop.model_runner.launch_forward = late  # type: ignore[method-assign]
    return loop


def request(id: str, tokens: int, **more: Any) -> Request:
    return Request(
        id=id, prompt=(5, 6, 7), params=tiny.params(max_tokens=tokens, ignore_eos=True), **more
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_a_request_waits_until_its_first_step_begins(
    monkeypatch: pytest.MonkeyPatch, tokens: int, overlap: bool
) -> None:
    """What the step computes is no waiting; and one that ends in its first step has waited, too."""
    clock = Clock(monkeypatch)
    loop = slow(tiny.make_engine(overlap=overlap), clock, 5.0)
    pooling = MEAN_POOLING if tokens == 0 else None
    replies = worked(loop, ReceivedRequest(request("a", tokens, pooling=pooling), clock.now - 2.0))
    assert replies[0] == RequestStarted("a", 2.0), "before anything that was computed"
    assert [each for each in replies if isinstance(each, RequestStarted)] == replies[:1]
    last = replies[-1]
    assert isinstance(last, StepTokens)
    assert last.tokens[-1].finish_reason is FinishReason.LENGTH


def test_who_has_to_wait_for_others_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted request never starts, and later ones are still reported."""
    clock = Clock(monkeypatch)
    loop = slow(tiny.make_engine(max_num_seqs=1, overlap=False), clock, 5.0)
    came = [ReceivedRequest(request(id, 2), clock.now) for id in "abcd"]
    replies = worked(loop, *came, AbortRequest("c"))
    assert [each for each in replies if isinstance(each, RequestStarted)] == [
        RequestStarted("a", 0.0),
        RequestStarted("b", 10.0),
        RequestStarted("d", 20.0),
    ]


def inbox(*messages: Message) -> tuple[socket.socket, WorkerInbox]:
    """A server's end of the socket, on which this was warnings, and the worker's inbox."""
    api_sock, worker_sock = socket.socketpair()
    box = WorkerInbox(MessageChannel(worker_sock), on_server_gone=lambda: None)
    for each in messages:
        api_sock.sendall(encode_frame(each))
    return api_sock, box


def test_waiting_begins_where_a_request_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for one whose grammar is made ready first, or that comes while a step runs."""
    clock = Clock(monkeypatch)
    guided = request("g", 3, grammar=Grammar("regex", "a"))
    api_socket, box = inbox()

    def make(_: Request) -> Any:
        clock.now += 7.0
        return "guide"

    box.set_guide_factory(make)
    with api_socket:
        api_socket.sendall(encode_frame(AddRequest(guided)))
        assert box.messages.get(timeout=TIMEOUT_SECONDS) == ReceivedRequest(
            guided, 100.0, cast(Any, "guide")
        )
        api_socket.sendall(encode_frame(AddRequest(request("a", 3))))
        assert box.messages.get(timeout=TIMEOUT_SECONDS) == ReceivedRequest(request("a", 3), 107.0)
    assert box.messages.get(timeout=TIMEOUT_SECONDS) is None


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RequestError("the regex cannot be used"), "the regex cannot be used"),
        (ValueError("secret"), "its grammar cannot be made ready: ValueError"),
        (MemoryError(), "its grammar cannot be made ready: MemoryError"),
    ],
)
def test_a_grammar_that_cannot_be_made_is_refused(error: Exception, line: str) -> None:
    api_socket, box = inbox()

    def make(_: Request) -> Any:
        raise error

    box.set_guide_factory(make)
    with api_socket:
        api_socket.sendall(encode_frame(AddRequest(request("g", 3, grammar=Grammar("regex", "a")))))
        come = box.messages.get(timeout=TIMEOUT_SECONDS)
        assert isinstance(come, ReceivedRequest)
        assert worked(tiny.make_engine(), come, ReceivedRequest(request("a", 1), 0.0))[
            0
        ] == RequestRejected("g", line)
    assert box.messages.get(timeout=TIMEOUT_SECONDS) is None


def full(error: Exception) -> Callable[[], EngineCore]:
    """Makes a loop that has no memory for requests of a certain length."""

    def make() -> EngineCore:
        loop = tiny.make_engine()
        add = loop.input_processor.add

        def added(request: Request, make_guide: Any = None) -> None:
            if len(request.prompt) == 9:
                raise error
            add(request, make_guide)

        loop.input_processor.add = added  # type: ignore[method-assign]
        return loop

    return make


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_memory_that_runs_out_before_a_step_ends_one_request(error: Exception) -> None:
    """A picture is read where its request comes in: what does not fit is refused, everyone else is
    answered.
    """

    async def main() -> None:
        async with (
            served_engine(ThreadLauncher(full(error))) as (engine, launcher),
            asyncio.timeout(TIMEOUT_SECONDS),
        ):
            other = engine.submit([make_request(engine, (5, 6), max_tokens=60, ignore_eos=True)])
            with pytest.raises(
                CapacityError, match=r"^the engine has no memory left for this request; send"
            ):
                await engine.submit([make_request(engine, (5,) * 9)]).wait_until_finished()
            await other.wait_until_finished()
            assert len(other.request_states[0].output.outputs[0].token_ids) == 60
            assert len(launcher.children) == 1
            assert engine.state is EngineState.READY

    asyncio.run(main())


async def open_client(path: Path, **run: Any) -> tuple[EngineClient, asyncio.Task[None]]:
    engine = EngineClient("stories", OpenEngine(str(path), {}, {**RUN, **run}), max_waiting=8)
    task = asyncio.create_task(engine.supervise_worker())
    await engine.load_finished.wait()
    return engine, task


@pytest.mark.parametrize(("caps", "length"), [(True, 512), (False, None)])
def test_a_length_for_several_engines_is_no_more_than_an_engine_has(
    stories: Path, monkeypatch: pytest.MonkeyPatch, caps: bool, length: int | None
) -> None:
    warnings = list[str]()
    monkeypatch.setattr(
        "modelmill.serve.engine_client._log.warning",
        lambda _, extra: warnings.append(extra["data"]["reason"]),
    )
    run = {**RUN, "max_model_len": 4096, "kv_cache_bytes": 8 << 20}

    async def main() -> None:
        order = OpenEngine(str(stories), {}, run, warm_up=False, caps_length=caps)
        engine = EngineClient("stories", order, max_waiting=8)
        task = asyncio.create_task(engine.supervise_worker())
        await engine.load_finished.wait()
        if length is None:
            assert "--max-model-len 4096 exceeds the engine's 512; lower it" in str(engine.error)
            assert not warnings
        else:
            assert engine.error is None
            assert (engine.max_model_len, engine.request_limits.max_len) == (length, length)
            assert warnings == ["--max-model-len 4096 exceeds the engine's 512, which holds"]
        await engine.close()
        await task

    asyncio.run(main())


def test_text_is_the_classes_and_a_killed_worker_is_replaced(
    stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = (
        LLM(stories, device="cpu", threads=1)
        .generate("Once upon a time", params)[0]
        .outputs[0]
        .text
    )

    async def main() -> None:
        engine, task = await open_client(stories)
        assert engine.state is EngineState.READY, engine.error
        first, pages = engine.pid, engine.engine_info.num_pages  # type: ignore[union-attr]
        # however far the worker comes before it is killed, its answer is not heard to the end
        push, num_tokens = engine.generation_client.on_token, itertools.count()
        monkeypatch.setattr(
            engine.generation_client,
            "on_token",
            lambda token: push(token) if next(num_tokens) < 3 else None,
        )
        ticket = engine.submit([engine.text_processor.request("Once upon a time", LONG)])
        await ticket.fetch_items()
        os.kill(first or 0, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await ticket.wait_until_finished()
        monkeypatch.undo()
        while engine.state is not EngineState.READY:
            await asyncio.sleep(0.01)
        assert engine.pid != first
        assert engine.engine_info.num_pages == pages  # type: ignore[union-attr]
        ticket = engine.submit([engine.text_processor.request("Once upon a time", params)])
        await ticket.wait_until_finished()
        assert ticket.request_states[0].output.outputs[0].text == expected
        last = engine.pid
        await engine.close()
        await task
        assert not psutil.pid_exists(last or 0)

    asyncio.run(main())


def test_what_cannot_be_opened_is_reported_in_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        engine, task = await open_client(tmp_path / "none.engine")
        await task
        assert engine.state is EngineState.FAILED
        assert engine.is_usage_error
        assert (
            engine.error
            == f"{tmp_path / 'none.engine'} does not exist; give an engine folder or a checkpoint"
        )
        (tmp_path / "empty.engine").mkdir()
        engine, task = await open_client(tmp_path / "empty.engine")
        await task
        assert engine.error is not None
        assert (
            f"{tmp_path / 'empty.engine'} is not an engine (it has no manifest.json)"
            in engine.error
        )

    asyncio.run(main())


PARENT = """
import asyncio, sys
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.worker_messages import OpenEngine

async def main():
    open_engine = OpenEngine(sys.argv[1], {}, {"device": "cpu", "threads": 1})
    engine = EngineClient("stories", open_engine, max_waiting=8)
    task = asyncio.create_task(engine.supervise_worker())
    if sys.argv[2] == "ready":
        await engine.load_finished.wait()
    while engine.pid is None:
        await asyncio.sleep(0.01)
    print(engine.pid, flush=True)
    await task

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["ready", "loading"])
def test_a_worker_ends_with_its_server(stories: Path, when: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(stories), when], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([worker], timeout=TIMEOUT_SECONDS)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
