"""A worker in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelmill.core.types import SamplingParams
from modelmill.llm import LLM
from modelmill.serve.engine import Engine, State
from modelmill.serve.message import Open
from modelmill.serve.ticket import WorkerLost

RUN = {"device": "cpu", "threads": 1, "max_num_seqs": 8}
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


async def opened(path: Path, **run: Any) -> tuple[Engine, asyncio.Task[None]]:
    engine = Engine("stories", Open(str(path), {}, {**RUN, **run}), queue=8)
    task = asyncio.create_task(engine.run())
    await engine.settled.wait()
    return engine, task


def test_text_is_the_classes_and_a_killed_worker_is_replaced(stories: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = LLM(stories, device="cpu", threads=1).generate("Once upon a time", params)[0].outputs[0].text

    async def main() -> None:
        engine, task = await opened(stories)
        assert engine.state is State.READY, engine.error
        first, pages = engine.pid, engine.facts.pages  # type: ignore[union-attr]
        ticket = engine.submit([engine.language.request("Once upon a time", LONG)])
        await ticket.fetch()
        os.kill(first or 0, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await ticket.finish()
        while engine.state is not State.READY:
            await asyncio.sleep(0.01)
        assert engine.pid != first
        assert engine.facts.pages == pages  # type: ignore[union-attr]
        ticket = engine.submit([engine.language.request("Once upon a time", params)])
        await ticket.finish()
        assert ticket.dialogues[0].answer.outputs[0].text == expected
        last = engine.pid
        await engine.close()
        await task
        assert not psutil.pid_exists(last or 0)

    asyncio.run(main())


def test_what_cannot_be_opened_is_told_in_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        engine, task = await opened(tmp_path / "none.engine")
        await task
        assert engine.state is State.FAILED
        assert engine.usage
        assert engine.error == f"{tmp_path / 'none.engine'} does not exist; give an engine folder or a checkpoint"

    asyncio.run(main())


PARENT = """
import asyncio, sys
from modelmill.serve.engine import Engine
from modelmill.serve.message import Open

async def main():
    engine = Engine("stories", Open(sys.argv[1], {}, {"device": "cpu", "threads": 1}), queue=8)
    task = asyncio.create_task(engine.run())
    if sys.argv[2] == "ready":
        await engine.settled.wait()
    while engine.pid is None:
        await asyncio.sleep(0.01)
    print(engine.pid, flush=True)
    await task

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["ready", "loading"])
def test_a_worker_ends_with_its_server(stories: Path, when: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(stories), when], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([worker], timeout=60)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
