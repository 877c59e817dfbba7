"""The two sides of ``benchmarks.serving_load``: the engine core alone, and a served engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serve_command import read_address, serve_command
from modelmill.core.config import RunConfig
from modelmill.core.errors import ModelmillError
from modelmill.core.types import Request, SamplingParams
from modelmill.eval.openai_client import OpenAIClient
from modelmill.runtime.engine_core import EngineCore

QUIET_STEPS = 60
"""Steps without long prompts that are timed."""


class CoreProcess:
    """The driver's end of a loop that waits on a pipe, pinned to a core."""

    def __init__(self, engine: Path, run: dict[str, Any], core: int) -> None:
        """run: fields of RunConfig."""
        words = [
            sys.executable,
            "-m",
            "benchmarks.serving_processes",
            str(engine),
            json.dumps(run),
            str(core),
        ]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ready(self) -> int:
        """Wait until it is open; the size of its vocabulary."""
        return int(self._read()["vocab"])

    def generate(self, prompts: Sequence[list[int]], tokens: int) -> tuple[float, float]:
        """Seconds, and CPU seconds, of all answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        reply = self._read()
        return float(reply["seconds"]), float(reply["cpu"])

    def burst(
        self, prompts: Sequence[list[int]], long: Sequence[list[int]]
    ) -> dict[str, list[float]]:
        """Return seconds of decode steps before a burst ("quiet") and while it runs ("during")."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "long": long}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and left a question unread
            self._process.stdin.close()
        self._process.wait(30)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the loop's process ended")
        return json.loads(line)


class ServedEngine:
    """``modelmill serve`` on one core, its worker on another."""

    def __init__(self, engine: Path, run: dict[str, Any], worker_core: int, core: int) -> None:
        """run: fields of RunConfig, given as flags."""
        self._cores = worker_core, core
        words = serve_command([engine], 0, "--served-model-name", "load")
        for name, value in run.items():
            words += ["--" + name.replace("_", "-"), str(value)]
        self._process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        self.client = OpenAIClient.from_url(read_address(self._process))

    def ready(self, seconds: float = 600) -> None:
        """Wait for it, and pin both processes."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                asyncio.run(self.client.get("/health"))
                break
            except ModelmillError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.2)
        self.api = psutil.Process(self._process.pid)
        (self.worker,) = [
            each for each in self.api.children() if "modelmill.serve.worker" in each.cmdline()
        ]
        for process, core in ((self.worker, self._cores[0]), (self.api, self._cores[1])):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})

    def cpu(self) -> dict[str, float]:
        """CPU seconds until now of the worker, the API and this process."""
        processes = {"worker": self.worker, "api": self.api, "client": psutil.Process()}
        times = {name: process.cpu_times() for name, process in processes.items()}
        return {name: each.user + each.system for name, each in times.items()}

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.terminate()
        self._process.communicate(timeout=60)


def _requests(name: str, prompts: Sequence[list[int]], tokens: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return [
        Request(id=f"{name} {i}", prompt=tuple(ids), params=params) for i, ids in enumerate(prompts)
    ]


def _generate(
    loop: EngineCore, name: str, prompts: Sequence[list[int]], tokens: int
) -> dict[str, float]:
    began, cpu, num_tokens = time.perf_counter(), time.process_time(), 0
    for request in _requests(name, prompts, tokens):
        loop.add(request)
    while loop.has_work:
        num_tokens += len(loop.step())
    return {
        "seconds": time.perf_counter() - began,
        "cpu": time.process_time() - cpu,
        "num_tokens": num_tokens,
    }


def _burst(
    loop: EngineCore, name: str, prompts: Sequence[list[int]], long: Sequence[list[int]]
) -> dict[str, list[float]]:
    """As a server's worker schedules.

    On a CPU in CPU seconds: what else runs there does not count.
    """
    scheduler = loop.scheduler
    saved = scheduler.limits, scheduler.adaptive_chunk, loop.clock
    scheduler.optimize_inter_token_latency(
        None, loop.device != "cpu", loop.model_runner.mixed_graph_token_counts
    )
    loop.clock = time.thread_time if loop.device == "cpu" else time.perf_counter
    step_times: dict[str, list[float]] = {"quiet": [], "during": []}

    def step(which: str) -> None:
        began = loop.clock()
        loop.step()
        step_times[which].append(loop.clock() - began)

    running, late = _requests(name, prompts, 1 << 30), _requests(name + " long", long, 1)
    for request in running:
        loop.add(request)
    for _ in range(QUIET_STEPS + 4):
        step("quiet")
    for request in late:
        loop.add(request)
    waiting = {request.id for request in late}
    while waiting & loop.output_processor.live_sequences.keys():
        step("during")
    for request in running:
        loop.abort(request.id)
    while loop.has_work:
        loop.step()
    scheduler.limits, scheduler.adaptive_chunk, loop.clock = saved
    return {"quiet": step_times["quiet"][4:], "during": step_times["during"]}


def run_core_process(engine: Path, run: dict[str, Any], core: int) -> None:
    """The loop's process: one line of requests in, one line of seconds out."""
    os.sched_setaffinity(0, {core})
    loop = EngineCore.open(engine, RunConfig(**run))
    loop.warm_up()
    print(json.dumps({"vocab": loop.vocab}), flush=True)
    for count, line in enumerate(sys.stdin):
        request = json.loads(line)
        long = request.get("long")
        result = (
            _generate(loop, str(count), request["prompts"], request["tokens"])
            if long is None
            else None
        )
        print(json.dumps(result or _burst(loop, str(count), request["prompts"], long)), flush=True)


if __name__ == "__main__":
    run_core_process(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
