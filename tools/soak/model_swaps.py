"""Clients that alternate between models of which the budget holds one; workers are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from modelmill.core.progress_callback import Progress
from modelmill.serve.catalogue.entries import read_manifest
from tools.soak.client import send_request
from tools.soak.memory_trend import fit_trend
from tools.soak.server import SoakFailure, SoakServer

CACHE_BYTES = 8_000_000
REFUSALS = (429, 503)
LOAD_FAILED = "model_load_failed"
PROMPTS = ("Once upon a time", "The dog", "Lily said", "One day")
NUM_CLIENTS = 4
KILL_TIMES = (1 / 6, 1 / 2, 5 / 6)
"""Parts of the time after which all workers are killed.

The trend of the memory leaves the first third out. So what the first kill takes once is not called
growth, and what every kill takes is seen twice.
"""
MAX_RECOVERY_SECONDS = 300.0
"""Seconds after the end of the run in which as many answers as clients must follow the last kill.
"""
MIN_TREND_SECONDS = 120.0
"""A shorter run does not judge the memory: caches and tokenizers still fill."""


def swap_models(
    engines: Sequence[Path], flags: Sequence[str], seconds: float, on_progress: Progress
) -> dict[str, Any]:
    """Serve the engines under a budget that holds the largest alone, and let clients alternate.

    A single engine is served under two names. At ``KILL_TIMES`` all workers are killed (SIGKILL),
    the one that is kept ready included. The run goes on until as many answers as there are clients
    follow the last kill.

    Raises:
        SoakFailure: an answer is wrong or does not come, a refusal says no reason, an engine does
            not load before the first kill, or the budget is exceeded.
    """
    paths = list(engines) if len(engines) > 1 else [*engines, *engines]
    with tempfile.TemporaryDirectory(prefix="modelmill-soak-") as folder:
        for number, path in enumerate(paths):
            (Path(folder) / f"model{number}").symlink_to(path.resolve())
        sizes = [read_manifest(path).weight_bytes + CACHE_BYTES for path in paths]
        budget = max(sizes) + min(sizes) // 2
        words = ["--models-dir", folder, "--memory-budget", str(budget)]
        words += ["--kv-cache-bytes", str(CACHE_BYTES), *flags]
        with SoakServer([], words) as server:
            names = [f"model{number}" for number in range(len(paths))]
            result = _SwapLoad(server, names, seconds, budget, on_progress).run()
        result["left_processes"] = server.leftover_processes()
    result["ok"] = result["ok"] and not result["left_processes"]
    return result


class _SwapLoad:
    """The clients, the kills and the measurements of one run."""

    def __init__(
        self,
        server: SoakServer,
        names: Sequence[str],
        seconds: float,
        budget: int,
        on_progress: Progress,
    ) -> None:
        self._server, self._names, self._budget = server, names, budget
        self._seconds, self._on_progress = seconds, on_progress
        self._started_at = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._num_answers_since_kill = 0
        self._answers: dict[tuple[str, str], str] = {}
        self._times: list[float] = []
        self._series: list[tuple[float, float, float]] = []

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._started_at

    def run(self) -> dict[str, Any]:
        """Run everything; return the counts and the memory."""
        asyncio.run(self._run())
        gauges = self._server.wait_until_idle()
        page = self._server.request("/metrics")[1]
        seconds, api, workers = (list(column) for column in zip(*self._series, strict=True))
        trend = fit_trend(seconds, api)
        ordered = sorted(self._times)
        return {
            "what": f"{self._seconds:g} s, {NUM_CLIENTS} clients, {len(self._names)} models",
            "ok": trend.flat or self._seconds < MIN_TREND_SECONDS,
            "counts": dict(sorted(self._counts.items())),
            "answered_after_last_kill": self._num_answers_since_kill,
            "loads": int(_sum(page, "model_load_seconds_count")),
            "load_seconds_mean": round(
                _sum(page, "model_load_seconds_sum") / _sum(page, "model_load_seconds_count"), 3
            ),
            "failed_loads": int(_sum(page, "model_load_failures_total")),
            "unloads": int(_sum(page, "model_unloads_total")),
            "seconds_median": round(ordered[len(ordered) // 2], 3),
            "seconds_max": round(ordered[-1], 3),
            "after": gauges,
            "memory": {"api": asdict(trend), "api_max": max(api), "workers_max": max(workers)},
            "series": self._series,
        }

    async def _run(self) -> None:
        clients = [self._client(index) for index in range(NUM_CLIENTS)]
        await asyncio.gather(self._watch(), self._kill(), *clients)

    @property
    def _is_over(self) -> bool:
        return (
            self._elapsed >= self._seconds
            and self._counts["kills"] == len(KILL_TIMES)
            and self._num_answers_since_kill >= NUM_CLIENTS
        )

    async def _client(self, index: int) -> None:
        """Send requests, each for another model than the one before."""
        rng, turn = random.Random(f"swap {index}"), index
        while not self._is_over:
            turn += 1
            await self._send(self._names[turn % len(self._names)], rng.choice(PROMPTS))

    async def _send(self, name: str, prompt: str) -> None:
        """Send one request.

        Raises:
            SoakFailure: it is neither answered as before nor refused with a reason, or its engine
                cannot be loaded although no worker was killed.
        """
        body = {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        started_at = time.monotonic()
        status, data = await send_request(self._server, "/v1/completions", body)
        self._times.append(time.monotonic() - started_at)
        answer = json.loads(data)
        if status == 200:
            text = answer["choices"][0]["text"]
            expected = self._answers.setdefault((name, prompt), text)
            if answer["model"] != name or text != expected:
                raise SoakFailure(f"{name}: {text!r}, before it was {expected!r}")
            self._counts["answered"] += 1
            self._num_answers_since_kill += 1
        elif status in REFUSALS and answer["error"]["message"]:
            code, message = answer["error"]["code"], answer["error"]["message"]
            if code == LOAD_FAILED and not self._counts["kills"]:
                raise SoakFailure(f"before any worker was killed: {message}")
            self._counts[f"refused: {code}"] += 1
            await asyncio.sleep(0.2)
        else:
            raise SoakFailure(f"{name}: status {status}, {data[-200:]!r}")

    async def _kill(self) -> None:
        """Kill the workers, whether they load, answer or wait; answers come between two kills."""
        for part in KILL_TIMES:
            while self._elapsed < part * self._seconds or not self._num_answers_since_kill:
                await asyncio.sleep(0.05)
            for worker in await asyncio.to_thread(self._server.workers):
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGKILL)
            self._counts["kills"] += 1
            self._num_answers_since_kill = 0

    async def _watch(self) -> None:
        """Measure memory, and check the budget and that answers come."""
        pause = max(0.2, self._seconds / 240)
        while not self._is_over:
            memory = await asyncio.to_thread(self._server.memory)
            self._series.append((self._elapsed, memory["api"], memory["worker"]))
            page = (await asyncio.to_thread(self._server.request, "/metrics"))[1]
            if _sum(page, "engine_memory_bytes") > self._budget:
                raise SoakFailure("the loaded models exceed the memory budget")
            if self._elapsed > self._seconds + MAX_RECOVERY_SECONDS:
                raise SoakFailure(f"too few answers after a kill: {dict(self._counts)}")
            self._on_progress("seconds", int(self._elapsed), int(self._seconds))
            await asyncio.sleep(pause)


def _sum(page: str, name: str) -> float:
    """The sum of a metric over its labels."""
    values = re.findall(rf"^modelmill:{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, values))
