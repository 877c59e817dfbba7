"""An engine and its worker: requests, leaving, slow readers, a worker that dies."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from typing import Any

import pytest
from prometheus_client import generate_latest

from modelmill.core.errors import RequestError
from modelmill.core.types import Request, SamplingParams, TokenOutput
from modelmill.request_output_state import RequestOutputState
from modelmill.serve import engine_client as engine_module
from modelmill.serve import json_logs
from modelmill.serve import request_handle as handle_module
from modelmill.serve.engine_client import READ_CHUNK_BYTES, EngineClient, read_message_batches
from modelmill.serve.engine_state import EngineNotReady, EngineState, QueueFull
from modelmill.serve.metrics import ServerMetrics
from modelmill.serve.request_handle import ClientTooSlow, WorkerLost
from modelmill.serve.worker_messages import Message, OpenEngine, StepTokens, encode_frame
from modelmill.text.tokenizer_loader import load_tokenizer
from tests.runtime import tiny
from tests.serve.thread_worker import (
    ThreadLauncher,
    ids_only_processor,
    make_request,
    served_engine,
)
from tests.text.conftest import gguf_spm
from tests.wait import TIMEOUT_SECONDS


async def run_request(
    engine: EngineClient, prompts: list[tuple[int, ...]], **params: Any
) -> list[tuple[int, ...]]:
    ticket = engine.submit([make_request(engine, prompt, **params) for prompt in prompts])
    await ticket.wait_until_finished()
    return [tuple(each.output.outputs[0].token_ids) for each in ticket.request_states]


async def idle(engine: EngineClient) -> None:
    """The worker holds nothing any more."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        stats = await engine.stats()
        assert stats is not None
        if (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages):
            assert not engine.generation_client.active_requests
            assert engine.generation_client.num_sequences == 0
            return
    raise AssertionError(f"still held: {stats}")


def test_tokens_are_those_of_the_loop_alone() -> None:
    prompts = tiny.prompts(20)
    outputs = tiny.run(tiny.make_engine(), tiny.requests(prompts, eos=()))
    expected = [outputs[str(i), 0] for i in range(len(prompts))]

    async def main() -> None:
        async with served_engine() as (engine, _):
            assert await run_request(engine, prompts) == expected
            apart = await asyncio.gather(*(run_request(engine, [prompt]) for prompt in prompts))
            assert [one for (one,) in apart] == expected
            await idle(engine)

    asyncio.run(main())


def test_clients_that_leave_give_everything_back() -> None:
    async def main() -> None:
        async with served_engine(max_waiting=1000) as (engine, _):
            tickets = [
                engine.submit([make_request(engine, prompt, max_tokens=80)])
                for prompt in tiny.prompts(200)
            ]
            for place, ticket in enumerate(tickets):
                if place % 3 == 0:
                    await ticket.fetch_items()
                ticket.close()
                ticket.close()
            await idle(engine)

    asyncio.run(main())


def test_too_many_wait() -> None:
    async def main() -> None:
        async with served_engine(max_waiting=4) as (engine, launcher):
            launcher.children[0].allow_steps.clear()
            room = engine.sequence_capacity
            ticket = engine.submit([make_request(engine, (5, 6), n=room)])
            with pytest.raises(QueueFull):
                engine.submit([make_request(engine, (5,))])
            with pytest.raises(RequestError, match="in one request"):
                engine.submit([make_request(engine, (5,), n=room + 1)])
            ticket.close()
            launcher.children[0].allow_steps.set()
            assert await run_request(engine, [(5,)])
            await idle(engine)

    asyncio.run(main())


@pytest.mark.parametrize("prompt", [(), (tiny.VOCAB,), (-1,), (5,) * 129])
def test_impossible_prompts_are_refused_before_they_travel(prompt: tuple[int, ...]) -> None:
    async def main() -> None:
        async with served_engine() as (engine, _):
            with pytest.raises(RequestError):
                engine.submit([make_request(engine, (5,)), make_request(engine, prompt)])
            assert not engine.generation_client.active_requests

    asyncio.run(main())


def test_a_reader_that_never_reads_is_given_up_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # more than one read returns
    monkeypatch.setattr(handle_module, "MAX_PENDING_ITEMS", 200)

    async def main() -> None:
        async with served_engine() as (engine, _):
            slow = engine.submit(
                [
                    make_request(
                        engine, (5, 6), n=4, temperature=1.0, max_tokens=100, ignore_eos=True
                    )
                ]
            )
            assert (
                len((await run_request(engine, [(7, 8)], max_tokens=60, ignore_eos=True))[0]) == 60
            )
            await idle(engine)
            assert len(await slow.fetch_items()) == 201
            with pytest.raises(ClientTooSlow):
                await slow.fetch_items()

    asyncio.run(main())


def test_a_worker_that_dies_is_reported_and_replaced() -> None:
    async def main() -> None:
        async with served_engine() as (engine, launcher):
            await run_request(engine, [(5, 6)])
            before = await engine.stats()
            launcher.children[0].allow_steps.clear()
            ticket = engine.submit([make_request(engine, (5, 6))])
            launcher.children[0].kill()
            with pytest.raises(WorkerLost):
                await ticket.wait_until_finished()
            assert engine.state is EngineState.RESTARTING
            with pytest.raises(EngineNotReady):
                engine.submit([make_request(engine, (5, 6))])
            while engine.state is not EngineState.READY:
                await asyncio.sleep(0.001)
            assert engine.restarts == 1
            assert await run_request(engine, [(5, 6)])
            after = await engine.stats()
            assert before is not None
            assert after is not None
            # counters go on where they were
            assert after.output_tokens == 2 * before.output_tokens
            await idle(engine)

    asyncio.run(main())


def test_a_worker_that_keeps_dying_is_given_up() -> None:
    class Mortal(ThreadLauncher):
        async def __call__(self) -> Any:
            sock, child = await super().__call__()
            if len(self.children) > 1:
                child.kill()
            return sock, child

    async def main() -> None:
        async with served_engine(Mortal()) as (engine, launcher):
            launcher.children[0].kill()
            while engine.state is not EngineState.FAILED:
                await asyncio.sleep(0.001)
            assert engine.error
            assert len(launcher.children) == 5

    asyncio.run(main())


def test_steps_that_came_together_are_heard_together() -> None:
    """A worker that is ahead costs the API one write for several tokens of an answer; not for all
    of them, though.
    """
    steps: list[Message] = [
        StepTokens([TokenOutput(f"request {i}", 0, step) for i in range(64)]) for step in range(40)
    ]

    async def main() -> list[list[Message]]:
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(map(encode_frame, steps)))
        reader.feed_eof()
        return [messages async for messages in read_message_batches(reader)]

    batches = asyncio.run(main())
    assert [message for messages in batches for message in messages] == steps
    most = READ_CHUNK_BYTES // len(encode_frame(steps[-1])) + 1
    assert 1 < max(map(len, batches)) <= most < 20


H, E, O = 265, 266, 268
"""Letters of the tiny SentencePiece vocabulary."""


def test_what_comes_behind_a_stop_string_is_no_news() -> None:
    """The worker learns of the end later: its tokens until then are neither sent nor counted."""
    params = SamplingParams(n=2, stop=("e",), max_tokens=9).with_defaults({})

    async def main() -> None:
        async with served_engine() as (engine, launcher):
            launcher.children[0].allow_steps.clear()
            metrics = ServerMetrics()
            engine.set_metrics(metrics.for_engine("tiny"), metrics.segment)
            dialogue = RequestOutputState(
                Request(id="r", prompt=(5,), params=params), None, load_tokenizer(gguf_spm())
            )
            ticket = engine.submit([dialogue])
            for step in (
                [(0, H), (1, H)],
                [(0, E), (1, O)],
                [(0, O), (1, O)],
                [(0, H), (1, O)],
                [(1, E)],
            ):
                engine._handle_message(
                    StepTokens([TokenOutput("r", index, id) for index, id in step])
                )
            deltas = [news.delta for news in await ticket.fetch_items()]
            events = [(delta.index, delta.text, delta.finish_reason) for delta in deltas]
            assert events == [
                (0, "h", None), (1, "h", None), (0, "", "stop"), (1, "o", None), (1, "o", None),
                (1, "o", None),
                (1, "", "stop"),
            ]  # fmt: skip
            assert [output.text for output in dialogue.output.outputs] == ["h", "hooo"]
            page = generate_latest(metrics.registry).decode()
            assert (
                'modelmill:request_success_total{finished_reason="stop",model_name="tiny"} 2.0'
                in page
            )
            launcher.children[0].allow_steps.set()

    asyncio.run(main())


def test_a_bug_that_one_answer_meets_ends_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with served_engine() as (engine, launcher):
            launcher.children[0].allow_steps.clear()
            ill, well = (
                engine.submit([make_request(engine, (5, 6))]),
                engine.submit([make_request(engine, (7, 8))]),
            )

            def broken(_: TokenOutput) -> Any:
                raise KeyError("of the answer")

            monkeypatch.setattr(ill.request_states[0], "process_token_output", broken)
            launcher.children[0].allow_steps.set()
            with pytest.raises(KeyError):
                await ill.wait_until_finished()
            await well.wait_until_finished()
            assert len(well.request_states[0].output.outputs[0].token_ids) == 12
            assert engine.restarts == 0
            await idle(engine)

    asyncio.run(main())


class Scarce(ThreadLauncher):
    """Starts whose places are in ``fail`` find no descriptor left; the first is 0."""

    def __init__(self, fail: range) -> None:
        super().__init__()
        self.tries, self._fail = 0, fail

    async def __call__(self) -> Any:
        self.tries += 1
        if self.tries - 1 in self._fail:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a secret prompt")
        return await super().__call__()


def tiny_client(launcher: ThreadLauncher, restart_delay: float = 0.2) -> EngineClient:
    """The client of an engine of seeded weights, whose worker is a thread."""
    return EngineClient(
        "tiny",
        OpenEngine("tiny", {}, {}),
        max_waiting=4,
        launch=launcher,
        load_text_processor=ids_only_processor,
        restart_delay=restart_delay,
    )


def test_a_worker_that_cannot_be_started_now_is_started_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A system that had nothing left for a while: each try counts, and the next one may succeed."""

    async def main() -> None:
        async with served_engine(Scarce(range(1, 4))) as (engine, launcher):
            launcher.children[0].kill()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while engine.restarts < 4 or engine.state is not EngineState.READY:
                    await asyncio.sleep(0.001)
            assert launcher.tries == 5
            assert engine.error is None
            assert await run_request(engine, [(5, 6)])

    with json_logs.log_to_stderr("warning"):
        asyncio.run(main())
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    failed = [line for line in lines if line["event"] == "worker failed"]
    assert [(line["engine"], line["error"], line["reason"]) for line in failed] == [
        ("tiny", "OSError", os.strerror(errno.EMFILE))
    ] * 3
    assert len([line for line in lines if line["event"] == "worker ended"]) == 4


@pytest.mark.parametrize("fail", [range(1), range(1, 99)], ids=["the first", "every later one"])
def test_a_worker_that_can_never_be_started_is_an_end_with_an_error(fail: range) -> None:
    async def main() -> None:
        launcher = Scarce(fail)
        engine = tiny_client(launcher, restart_delay=0.001)
        task = asyncio.create_task(engine.supervise_worker())
        await engine.load_finished.wait()
        for child in launcher.children:
            child.kill()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await task
        assert engine.state is EngineState.FAILED
        assert engine.error == f"the worker of tiny failed: {os.strerror(errno.EMFILE)}"
        assert launcher.tries == (1 if fail.start == 0 else 5)

    asyncio.run(main())


def test_an_unreadable_message_costs_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with served_engine() as (engine, launcher):
            launcher.children[0].allow_steps.clear()
            ticket = engine.submit([make_request(engine, (5, 6))])
            with monkeypatch.context() as patch:
                patch.setattr(engine, "_handle_message", lambda _: {}["a bug"])
                launcher.children[0].allow_steps.set()
                with pytest.raises(WorkerLost):
                    await ticket.wait_until_finished()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while engine.state is not EngineState.READY:
                    await asyncio.sleep(0.001)
            assert engine.restarts == 1
            assert not launcher.children[0]._thread.is_alive()
            assert await run_request(engine, [(5, 6)])

    asyncio.run(main())


def test_a_worker_that_is_being_started_while_the_engine_is_closed_is_ended() -> None:
    class Slow(ThreadLauncher):
        begun, go = asyncio.Event(), asyncio.Event()

        async def __call__(self) -> Any:
            self.begun.set()
            await self.go.wait()
            return await super().__call__()

    async def main() -> None:
        launcher = Slow()
        engine = tiny_client(launcher)
        task = asyncio.create_task(engine.supervise_worker())
        await launcher.begun.wait()
        await engine.close()
        launcher.go.set()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await task
        assert engine.state is EngineState.STOPPED
        assert not launcher.children[0]._thread.is_alive()

    asyncio.run(main())


def test_a_worker_that_the_system_cannot_end_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stuck(ThreadLauncher):
        async def __call__(self) -> Any:
            sock, child = await super().__call__()
            child.wait = asyncio.Event().wait  # type: ignore[method-assign, assignment]
            return sock, child

    async def main() -> None:
        monkeypatch.setattr(engine_module, "KILL_TIMEOUT", 0.01)
        launcher = Stuck()
        engine = tiny_client(launcher)
        task = asyncio.create_task(engine.supervise_worker())
        await engine.load_finished.wait()
        launcher.children[0].kill()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await task
        assert engine.state is EngineState.FAILED
        assert engine.error == "the worker of tiny ended, and the system cannot end its process 0"

    asyncio.run(main())
