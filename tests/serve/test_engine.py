"""An engine and its worker: requests, leaving, slow readers, a worker that dies."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from modelmill.core.errors import RequestError
from modelmill.core.types import Token
from modelmill.serve import ticket as ticket_module
from modelmill.serve.engine import AT_ONCE, Busy, Engine, NotReady, State, received
from modelmill.serve.message import Message, Told, encode
from modelmill.serve.ticket import TooSlow, WorkerLost
from tests.runtime import tiny
from tests.serve.local import Launcher, ask, served


async def answered(engine: Engine, prompts: list[tuple[int, ...]], **params: Any) -> list[tuple[int, ...]]:
    ticket = engine.submit([ask(engine, prompt, **params) for prompt in prompts])
    await ticket.finish()
    return [tuple(each.answer.outputs[0].token_ids) for each in ticket.dialogues]


async def idle(engine: Engine) -> None:
    """The worker holds nothing any more."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        stats = await engine.stats()
        assert stats is not None
        if (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages):
            assert not engine._running
            assert engine._seqs == 0
            return
    raise AssertionError(f"still held: {stats}")


def test_tokens_are_those_of_the_loop_alone() -> None:
    prompts = tiny.prompts(20)
    found = tiny.run(tiny.loop(), tiny.requests(prompts, eos=()))
    expected = [found[str(i), 0] for i in range(len(prompts))]

    async def main() -> None:
        async with served() as (engine, _):
            assert await answered(engine, prompts) == expected
            apart = await asyncio.gather(*(answered(engine, [prompt]) for prompt in prompts))
            assert [one for (one,) in apart] == expected
            await idle(engine)

    asyncio.run(main())


def test_clients_that_leave_give_everything_back() -> None:
    async def main() -> None:
        async with served(queue=1000) as (engine, _):
            tickets = [engine.submit([ask(engine, prompt, max_tokens=80)]) for prompt in tiny.prompts(200)]
            for place, ticket in enumerate(tickets):
                if place % 3 == 0:
                    await ticket.fetch()
                ticket.close()
                ticket.close()
            await idle(engine)

    asyncio.run(main())


def test_too_many_wait() -> None:
    async def main() -> None:
        async with served(queue=4) as (engine, launcher):
            launcher.children[0].stepping.clear()
            room = engine.capacity
            ticket = engine.submit([ask(engine, (5, 6), n=room)])
            with pytest.raises(Busy):
                engine.submit([ask(engine, (5,))])
            with pytest.raises(RequestError, match="at once"):
                engine.submit([ask(engine, (5,), n=room + 1)])
            ticket.close()
            launcher.children[0].stepping.set()
            assert await answered(engine, [(5,)])
            await idle(engine)

    asyncio.run(main())


@pytest.mark.parametrize("prompt", [(), (tiny.VOCAB,), (-1,), (5,) * 129])
def test_impossible_prompts_are_refused_before_they_travel(prompt: tuple[int, ...]) -> None:
    async def main() -> None:
        async with served() as (engine, _):
            with pytest.raises(RequestError):
                engine.submit([ask(engine, (5,)), ask(engine, prompt)])
            assert not engine._running

    asyncio.run(main())


def test_a_reader_that_never_reads_is_given_up_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # more than the other one is ever told at once
    monkeypatch.setattr(ticket_module, "BEHIND", 200)

    async def main() -> None:
        async with served() as (engine, _):
            slow = engine.submit([ask(engine, (5, 6), n=4, temperature=1.0, max_tokens=100, ignore_eos=True)])
            assert len((await answered(engine, [(7, 8)], max_tokens=60, ignore_eos=True))[0]) == 60
            await idle(engine)
            assert len(await slow.fetch()) == 201
            with pytest.raises(TooSlow):
                await slow.fetch()

    asyncio.run(main())


def test_a_worker_that_dies_is_told_and_replaced() -> None:
    async def main() -> None:
        async with served() as (engine, launcher):
            await answered(engine, [(5, 6)])
            before = await engine.stats()
            launcher.children[0].stepping.clear()
            ticket = engine.submit([ask(engine, (5, 6))])
            launcher.children[0].kill()
            with pytest.raises(WorkerLost):
                await ticket.finish()
            assert engine.state is State.RESTARTING
            with pytest.raises(NotReady):
                engine.submit([ask(engine, (5, 6))])
            while engine.state is not State.READY:
                await asyncio.sleep(0.001)
            assert engine.restarts == 1
            assert await answered(engine, [(5, 6)])
            after = await engine.stats()
            assert before is not None
            assert after is not None
            # counters go on where they were
            assert after.output_tokens == 2 * before.output_tokens
            await idle(engine)

    asyncio.run(main())


def test_a_worker_that_keeps_dying_is_given_up() -> None:
    class Mortal(Launcher):
        async def __call__(self) -> Any:
            sock, child = await super().__call__()
            if len(self.children) > 1:
                child.kill()
            return sock, child

    async def main() -> None:
        async with served(Mortal()) as (engine, launcher):
            launcher.children[0].kill()
            while engine.state is not State.FAILED:
                await asyncio.sleep(0.001)
            assert engine.error
            assert len(launcher.children) == 5

    asyncio.run(main())


def test_steps_that_came_together_are_heard_together() -> None:
    """A worker that is ahead costs the API one write for several tokens of an answer; not for all of them, though."""
    steps: list[Message] = [Told([Token(f"request {i}", 0, step) for i in range(64)]) for step in range(40)]

    async def main() -> list[list[Message]]:
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(map(encode, steps)))
        reader.feed_eof()
        return [messages async for messages in received(reader)]

    found = asyncio.run(main())
    assert [message for messages in found for message in messages] == steps
    most = AT_ONCE // len(encode(steps[-1])) + 1
    assert 1 < max(map(len, found)) <= most < 20
