"""Workers that hang: detected, reported, killed with their child processes, and replaced.

A long step does not hang.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelmill.core.types import Request, SamplingParams, SleepOrWakeReport
from modelmill.runtime import sleep_mode
from modelmill.runtime.engine_core import EngineCore
from modelmill.serve import json_logs, sleep_worker
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.engine_state import EngineNotReady, EngineState
from modelmill.serve.metrics import ServerMetrics
from modelmill.serve.request_handle import WorkerLost
from modelmill.serve.segmentation_messages import SegmentationJob
from modelmill.serve.watchdog import MIN_FIRST_HEARTBEAT_TIMEOUT, Watchdog, poll_interval
from modelmill.serve.worker import needs_op_heartbeats
from modelmill.serve.worker_inbox import HeartbeatSender, MessageChannel
from modelmill.serve.worker_messages import (
    EngineReady,
    Heartbeat,
    Message,
    OpenEngine,
    Ping,
    SleepEngine,
    SleepOrWakeReply,
    encode_frame,
)
from tests.runtime import tiny
from tests.serve.segment_service import encode_image, random_photo
from tests.serve.server_process import ServerProcess
from tests.serve.test_worker import Clock, inbox
from tests.serve.thread_worker import (
    ThreadLauncher,
    ThreadWorker,
    ids_only_processor,
    make_request,
)
from tests.serve.watchdog_clock import MANY_POLLS, ManualClock, launch_hanging_worker, wait_until
from tests.wait import TIMEOUT_SECONDS

LIMIT = 4.0
TURN = poll_interval(LIMIT)
WITHIN = int(LIMIT / TURN)
"""Turns in which a worker may be silent."""
RUN = {"device": "cpu", "threads": 1, "max_num_seqs": 8, "kv_cache_bytes": 8 << 20}
STORY = SamplingParams(temperature=0, max_tokens=40)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


async def hung(dog: Watchdog, turns: ManualClock, count: int) -> bool:
    """Whether the worker is found to hang after so many more turns."""
    watch = asyncio.create_task(dog.wait_until_hung())
    await turns.spend(count)
    is_hung = watch.done()
    watch.cancel()
    return is_hung


@asynccontextmanager
async def watched_tiny(launcher: ThreadLauncher) -> AsyncIterator[Watched]:
    """A watched engine of seeded weights, whose worker is a thread; a hang is a failure."""
    order = OpenEngine("tiny", {}, {}, watchdog_seconds=LIMIT)
    watched = Watched(order, launch=launcher, load_text_processor=ids_only_processor)
    async with asyncio.timeout(TIMEOUT_SECONDS), watched:
        yield watched


def test_silence_beyond_the_limit_is_a_hang() -> None:
    async def main() -> None:
        pings: list[None] = []
        turns = ManualClock()
        dog = Watchdog(LIMIT, lambda: pings.append(None), turns)
        dog.on_message()
        assert not await hung(dog, turns, WITHIN)
        assert len(pings) == 1, "one question at a time"
        dog.on_message()
        assert not await hung(dog, turns, WITHIN)
        assert len(pings) == 2
        assert await hung(dog, turns, 1)

    asyncio.run(main())


def test_what_the_api_does_not_listen_to_is_no_silence() -> None:
    """It reads a tokenizer before it goes on to read the socket."""

    async def main() -> None:
        turns = ManualClock()
        dog = Watchdog(LIMIT, lambda: None, turns)
        dog.on_message()
        with dog.ignoring_silence():
            assert not await hung(dog, turns, 3 * WITHIN)
        assert not await hung(dog, turns, WITHIN)
        assert await hung(dog, turns, 1)

    asyncio.run(main())


def test_a_process_has_longer_for_its_first_sign_of_life_and_0_is_never() -> None:
    async def main() -> None:
        turns = ManualClock()
        assert not await hung(
            Watchdog(LIMIT, lambda: None, turns), turns, int(MIN_FIRST_HEARTBEAT_TIMEOUT / TURN)
        )
        never = Watchdog(0, lambda: None, turns)
        watch = asyncio.create_task(never.wait_until_hung())
        turns.grant(MANY_POLLS)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not watch.done()
        watch.cancel()

    asyncio.run(main())


def test_a_long_step_gives_signs_of_life_between_its_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here each operation takes a second; what never comes out of one says nothing."""
    loop = tiny.make_engine()
    clock, sent = Clock(monkeypatch), list[Message]()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    pulse = HeartbeatSender(sent.append, 10.0)

    def second() -> None:
        clock.now += 1.0
        pulse()

    loop.set_heartbeat(second)
    began = clock.now
    loop.add(Request(id="a", prompt=tuple(range(5, 95)), params=tiny.params(max_tokens=1)))
    loop.step()
    took = clock.now - began
    assert took > 20
    assert sent == [Heartbeat()] * int(took // 10)


@pytest.mark.parametrize(
    ("device", "warm", "limit", "expected"),
    [("cpu", True, 9.0, True), ("cpu", False, 9.0, True), ("cpu", True, 0, False),
    ("cuda:0", True, 9.0, False),
     ("cuda:0", False, 9.0, True), ("cuda:0", False, 0, False)],
)  # fmt: skip
def test_what_compiles_in_its_first_steps_gives_signs_of_life(
    device: str, warm: bool, limit: float, expected: bool
) -> None:
    assert (
        needs_op_heartbeats(OpenEngine("a", {}, {}, warm_up=warm, watchdog_seconds=limit), device)
        is expected
    )


def test_answers_are_the_same_with_signs_of_life() -> None:
    requests = tiny.requests(tiny.prompts(8), tiny.params(max_tokens=9))
    loop, beats = tiny.make_engine(), list[None]()
    loop.set_heartbeat(lambda: beats.append(None))
    assert tiny.run(loop, requests) == tiny.run(tiny.make_engine(), requests)
    assert beats


def test_a_process_that_opens_an_engine_answers_for_itself() -> None:
    """Whatever takes minutes there; once it is open only the engine's own thread does."""
    api_socket, box = inbox()
    with api_socket:
        box._answers_pings = True
        api_socket.sendall(encode_frame(Ping()))
        assert api_socket.recv(100) == encode_frame(Heartbeat())
        box.stop_answering_pings()
        api_socket.sendall(encode_frame(Ping()))
        assert box.messages.get(timeout=TIMEOUT_SECONDS) == Ping()
    assert box.messages.get(timeout=TIMEOUT_SECONDS) is None


class Watched:
    """An engine whose watchdog's time passes when the test says so."""

    def __init__(self, order: OpenEngine, **options: Any) -> None:
        self.turns, self.metrics = ManualClock(), ServerMetrics()
        self.engine = EngineClient(
            "tiny", order, max_waiting=8, restart_delay=0.001, sleep=self.turns, **options
        )
        self.engine.set_metrics(self.metrics.for_engine("tiny"), self.metrics.segment)

    async def __aenter__(self) -> Watched:
        self._task = asyncio.create_task(self.engine.supervise_worker())
        await self.engine.load_finished.wait()
        assert self.engine.state is EngineState.READY, self.engine.error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        await self._task

    async def answer(self, prompt: str) -> str:
        ticket = self.engine.submit([self.engine.text_processor.request(prompt, STORY)])
        await ticket.wait_until_finished()
        return ticket.request_states[0].output.outputs[0].text

    def counted(self, reason: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "modelmill:worker_restarts_total", {"model_name": "tiny", "reason": reason}
        )
        assert value is not None
        return value


def test_a_step_that_does_not_end_is_reported_and_the_worker_replaced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def main() -> None:
        launcher = ThreadLauncher()
        async with watched_tiny(launcher) as watched:
            engine = watched.engine
            first = engine.submit([make_request(engine, (5, 6))])
            await first.wait_until_finished()
            launcher.children[0].allow_steps.clear()
            ticket = engine.submit([make_request(engine, (5, 6))])
            await watched.turns.spend(WITHIN)
            assert engine.state is EngineState.READY
            watched.turns.grant(2)
            with pytest.raises(
                WorkerLost,
                match=r"^the engine tiny gave no sign of life for 4 s while it answered; ",
            ):
                await ticket.wait_until_finished()
            assert engine.state is EngineState.RESTARTING
            with pytest.raises(EngineNotReady):
                engine.submit([make_request(engine, (5, 6))])
            await wait_until(lambda: engine.state is EngineState.READY)
            assert engine.restarts == 1
            assert (watched.counted("hung"), watched.counted("ended")) == (1, 0)
            second = engine.submit([make_request(engine, (5, 6))])
            await second.wait_until_finished()
            ids = [each.request_states[0].output.outputs[0].token_ids for each in (first, second)]
            assert ids[0] == ids[1]

    with json_logs.log_to_stderr("warning"):
        asyncio.run(main())
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in entries] == ["worker hung", "worker ended"]
    assert (entries[0]["engine"], entries[0]["seconds"], entries[0]["answers"]) == (
        "tiny",
        LIMIT,
        1,
    )


def test_a_long_step_just_under_the_limit_is_left_alone() -> None:
    """Also repeatedly: each sign of life resets the count."""

    async def main() -> None:
        launcher = ThreadLauncher()
        async with watched_tiny(launcher) as watched:
            engine = watched.engine
            stepping = launcher.children[0].allow_steps
            for _ in range(3):
                stepping.clear()
                ticket = engine.submit([make_request(engine, (5, 6))])
                await watched.turns.spend(WITHIN)
                stepping.set()
                await ticket.wait_until_finished()
            assert (engine.restarts, len(launcher.children)) == (0, 1)
            assert watched.counted("hung") == 0

    asyncio.run(main())


def test_an_engine_with_nothing_to_do_is_asked_and_answers() -> None:
    """Far more turns than it may be silent for; each waits until the answer has come."""

    async def main() -> None:
        async with watched_tiny(ThreadLauncher()) as watched:
            received: list[None] = []
            hear = watched.engine._handle_message

            def record_message(message: Message) -> None:
                if isinstance(message, Heartbeat):
                    received.append(None)
                hear(message)

            watched.engine._handle_message = record_message  # type: ignore[method-assign]
            for _ in range(3 * WITHIN):
                before = len(received)
                await watched.turns.spend(1)
                await wait_until(lambda: len(received) > before)  # noqa: B023
            assert watched.engine.restarts == 0

    asyncio.run(main())


async def bounded(work: Awaitable[None]) -> None:
    """A hang is a failure, not a run that never ends."""
    async with asyncio.timeout(2 * TIMEOUT_SECONDS):
        await work


async def wait_until_gone(pids: list[int]) -> None:
    """Until none of these processes is there."""
    await wait_until(lambda: not any(alive(pid) for pid in pids))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


async def begun(watched: Watched, **request: Any) -> Any:
    """A long answer of which some is there."""
    dialogue = watched.engine.text_processor.request(
        {"prompt": "Once upon a time", **request}, LONG
    )
    ticket = watched.engine.submit([dialogue])
    await ticket.fetch_items()
    return ticket


async def stopped_in_an_answer(watched: Watched) -> Any:
    # however far the worker comes before it is stopped, its answer is not heard to the end
    client = watched.engine.generation_client
    push = client.on_token
    client.on_token = lambda token: push(token) if token.finish_reason is None else None  # type: ignore[method-assign]
    ticket = await begun(watched)
    stop(watched.engine.pid or 0)
    return ticket


async def in_a_step_for_ever(watched: Watched) -> Any:
    return await begun(watched, cache_salt="hang")


def test_a_real_worker_that_hangs(stories: Path) -> None:
    """The same tokens as before come from the next one, which has the same memory."""

    async def main() -> None:
        async with Watched(
            OpenEngine(str(stories), {}, RUN, watchdog_seconds=LIMIT), launch=launch_hanging_worker
        ) as watched:
            engine = watched.engine
            expected, pages = await watched.answer("Once upon"), engine.engine_info.num_pages  # type: ignore[union-attr]
            for count, fault in enumerate((stopped_in_an_answer, in_a_step_for_ever), 1):
                pid = engine.pid or 0
                ticket = await fault(watched)
                watched.turns.grant(WITHIN + 2)
                with pytest.raises(WorkerLost, match="no sign of life"):
                    await ticket.wait_until_finished()
                await wait_until(lambda: engine.restarts == count)  # noqa: B023
                assert not alive(pid)
                await wait_until(lambda: engine.state is EngineState.READY)
                assert engine.engine_info.num_pages == pages  # type: ignore[union-attr]
                assert watched.counted("hung") == count
                engine.generation_client.__dict__.pop("on_token", None)
                assert await watched.answer("Once upon") == expected

    asyncio.run(bounded(main()))


def test_a_rank_that_is_stopped_while_nothing_runs(stories: Path) -> None:
    """The engine's process lives, but cannot answer for its rank; both are ended."""

    async def main() -> None:
        order = OpenEngine(str(stories), {}, {**RUN, "tp": 2}, watchdog_seconds=LIMIT)
        async with Watched(order) as watched:
            worker = watched.engine.pid or 0
            (rank,) = psutil.Process(worker).children()
            stop(rank.pid)
            watched.turns.grant(WITHIN + 2)
            await wait_until(lambda: watched.engine.restarts == 1)
            await wait_until_gone([worker, rank.pid])
            assert watched.counted("hung") == 1

    asyncio.run(bounded(main()))


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs Linux, which ends a process with its parent"
)
def test_a_rank_that_is_stopped_ends_with_a_worker_that_dies_by_itself(stories: Path) -> None:
    """No process is left that could end it, and it cannot notice the loss itself."""

    async def main() -> None:
        order = OpenEngine(str(stories), {}, {**RUN, "tp": 2}, watchdog_seconds=0)
        async with Watched(order) as watched:
            worker = watched.engine.pid or 0
            (rank,) = psutil.Process(worker).children()
            stop(rank.pid)
            os.kill(worker, signal.SIGKILL)
            await wait_until_gone([worker, rank.pid])
            await wait_until(
                lambda: watched.engine.state is EngineState.READY and watched.engine.restarts == 1
            )

    asyncio.run(bounded(main()))


def test_a_worker_for_pictures_that_is_stopped(sam: Path) -> None:
    async def main() -> None:
        async with Watched(OpenEngine(str(sam), {}, RUN, watchdog_seconds=LIMIT)) as watched:
            engine = watched.engine
            look = SegmentationJob(
                "a",
                prompts=[{"points": [[9, 9]], "labels": [1], "box": None, "mask": None}],
                image=encode_image(random_photo()),
            )
            expected = (await engine.submit_segmentation(look).wait_until_finished()).payload[
                "masks"
            ]
            pid = engine.pid or 0
            stop(pid)
            glance = engine.submit_segmentation(look)
            watched.turns.grant(WITHIN + 2)
            with pytest.raises(WorkerLost, match="no sign of life"):
                await glance.wait_until_finished()
            await wait_until(lambda: engine.state is EngineState.READY and engine.restarts == 1)
            assert not alive(pid)
            assert (await engine.submit_segmentation(look).wait_until_finished()).payload[
                "masks"
            ] == expected

    asyncio.run(bounded(main()))


def test_a_worker_that_is_stopped_while_it_loads_for_the_first_time(stories: Path) -> None:
    async def main() -> None:
        turns = ManualClock()
        engine = EngineClient(
            "tiny",
            OpenEngine(str(stories), {}, RUN, watchdog_seconds=LIMIT),
            max_waiting=8,
            sleep=turns,
        )
        task = asyncio.create_task(engine.supervise_worker())
        await wait_until(lambda: engine.pid is not None)
        pid = engine.pid or 0
        stop(pid)
        turns.grant(int(MIN_FIRST_HEARTBEAT_TIMEOUT / TURN) + 2)
        await task
        assert engine.state is EngineState.FAILED
        assert engine.error == "the worker of tiny gave no sign of life for 300 s"
        assert not alive(pid)

    asyncio.run(bounded(main()))


def test_a_server_with_a_worker_that_is_stopped(stories: Path) -> None:
    """In real time and without requests: 503, a line in the log, and the next request is served by
    another worker.
    """
    body = {"model": "stories", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 9}
    with ServerProcess(stories, "--watchdog-timeout", 5) as server:
        expected = server.request("/v1/completions", body)[1]["choices"][0]["text"]
        (worker,) = server.workers
        worker.suspend()
        assert server.wait(503)["engines"][0]["state"] == "restarting"
        assert server.wait(200)["engines"][0]["restarts"] >= 1
        assert server.request("/v1/completions", body)[1]["choices"][0]["text"] == expected
        page = server.request("/metrics")[1]
        assert 'modelmill:worker_restarts_total{model_name="stories",reason="hung"}' in page
        assert not worker.is_running()
        server.process.send_signal(signal.SIGTERM)
        _, stderr = server.finish()
        assert '"event": "worker hung"' in stderr


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "0.01"])
def test_a_limit_that_makes_no_sense(value: str, cli: Any) -> None:
    code, _, stderr = cli("serve", "a", f"--watchdog-timeout={value}")
    assert code == 2
    assert stderr.startswith(
        "modelmill: --watchdog-timeout must be 0 (never) or at least 0.1 seconds, not "
    )


def test_going_to_sleep_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """To pin the memory of large weights takes as long as the system needs."""
    may_end = threading.Event()

    def slow_sleep(core: EngineCore) -> SleepOrWakeReport:
        assert may_end.wait(TIMEOUT_SECONDS)
        return sleep_mode.sleep(core)

    monkeypatch.setattr(sleep_worker, "sleep", slow_sleep)
    worker = ThreadWorker(lambda: tiny.make_engine(enable_sleep_mode=True))
    server = MessageChannel(worker.api_socket)
    worker.api_socket.settimeout(TIMEOUT_SECONDS)
    server.send(OpenEngine("tiny", {}, {}))
    assert isinstance(server.receive(), EngineReady)
    server.send(SleepEngine(7))
    assert isinstance(server.receive(), Heartbeat)
    for _ in range(3):
        server.send(Ping())
        assert isinstance(server.receive(), Heartbeat)
    may_end.set()
    reply = server.receive()
    assert isinstance(reply, SleepOrWakeReply)
    assert (reply.number, reply.error) == (7, "")
    server.send(Ping())
    assert isinstance(server.receive(), Heartbeat)
    worker.kill()
