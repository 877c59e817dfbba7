"""The long demonstrations of tools.soak, cut short."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.wait import wait_until
from tools.soak import client_disconnects, fuzz, mixed_load, model_swaps, shutdown
from tools.soak.memory_trend import fit_trend
from tools.soak.server import NUM_LOG_LINES, SoakFailure, SoakServer

QUIET = [
    "--device",
    "cpu",
    "--threads",
    "1",
    "--kv-cache-bytes",
    "8000000",
    "--chat-template",
    "chatml",
]


def ignore_progress(stage: str, done: int, total: int) -> None:
    assert stage
    assert 0 <= done <= max(total, done)


def test_rough_treatment_leaves_the_server_as_it_was(
    stories: Path,
    sam: Path,
    tmp_path: Path,
) -> None:
    """Hostile requests, clients that leave, everything at once: the same workers, nothing runs,
    every page is free.
    """
    with SoakServer([stories, sam], QUIET) as server:
        assert server.segment_model is not None
        result = fuzz.fuzz(server, 160, 1, ignore_progress)
        assert sum(result["statuses"].values()) == 160
        assert set(result["after"].values()) == {0.0}
        left = client_disconnects.run_disconnects(server, 60, ignore_progress, concurrency=20)
        assert left["ok"]
        assert left["had_read_something"] > 30
        load_result = mixed_load.run_mixed_load(server, 0.1, 0, ignore_progress, clients=4)
        assert sum(load_result["requests"].values()) > 4
        mixed_load.plot(load_result, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size > 5000
    assert server.leftover_processes() == []


def test_models_that_alternate_and_workers_that_are_killed(stories: Path) -> None:
    flags = [each for each in QUIET if each not in ("--kv-cache-bytes", "8000000")]
    result = model_swaps.swap_models([stories], flags, 20, ignore_progress)
    assert result["ok"]
    assert result["counts"]["kills"] == len(model_swaps.KILL_TIMES)
    assert result["answered_after_last_kill"] >= model_swaps.NUM_CLIENTS
    assert result["loads"] > 2
    assert result["left_processes"] == []


def test_an_engine_that_does_not_load_ends_the_run(stories: Path) -> None:
    """Refusals alone would go on for ever: without an answer no worker is killed."""
    flags = ["--device", "cpu", "--chat-template", "chatml", "--kv-cache-bytes", "1000"]
    with pytest.raises(SoakFailure, match=r"before any worker was killed: .*--kv-cache-bytes"):
        model_swaps.swap_models([stories], flags, 20, ignore_progress)


def test_the_log_of_a_server_is_read(stories: Path) -> None:
    """More than a pipe holds: no line is missing, and the last ones are there."""
    with SoakServer([stories], [*QUIET, "--log-level", "info"]) as server:
        for _ in range(800):  # each of them logs a line of more than 100 bytes
            assert server.request("/v1/models")[0] == 200
    lines = list(server.last_log_lines)
    assert len(lines) == NUM_LOG_LINES
    assert any('"path": "/v1/models"' in line for line in lines)
    assert not any("log lines dropped" in line for line in lines)


def test_a_server_that_does_not_answer_is_a_failure_with_its_log(stories: Path) -> None:
    with SoakServer([stories], [*QUIET, "--log-level", "info"]) as server:
        wait_until(lambda: any("/v1/models" in line for line in list(server.last_log_lines)))
        server.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(
                SoakFailure, match=r"(?s)/metrics: no answer.* log ends:.*/v1/models"
            ):
                server.request("/metrics", seconds=0.1)
        finally:
            server.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    "check_shutdown",
    [shutdown.check_killed_while_loading, shutdown.check_server_killed],
    ids=lambda check: check.__name__,
)
def test_kills(stories: Path, check_shutdown: object) -> None:
    result = check_shutdown(stories, QUIET)  # type: ignore[operator]
    assert result["ok"], result


def test_a_slope_is_seen_through_noise() -> None:
    rng = np.random.default_rng(0)
    seconds = list(np.arange(0, 1200, 5.0))
    noise = rng.normal(0, 3, len(seconds))
    still = fit_trend(seconds, list(500 + noise))
    assert still.flat
    assert abs(still.per_minute) < 0.2
    leak = fit_trend(seconds, list(500 + noise + np.asarray(seconds) / 40))
    assert not leak.flat
    assert leak.per_minute == pytest.approx(1.5, abs=0.2)
    # what comes at the start is not counted
    assert fit_trend(seconds, list(500 + noise - 100 * np.exp(-np.asarray(seconds) / 60))).flat


def test_what_the_first_kill_takes_is_no_growth_and_what_every_kill_takes_is() -> None:
    seconds = list(np.arange(0, 125, 0.6))
    kills = [125 * part + 1 for part in model_swaps.KILL_TIMES]

    def memory(steps: list[float]) -> list[float]:
        """Megabytes of a process that takes so many more at each kill."""
        return [
            170 + sum(mb for mb, kill in zip(steps, kills, strict=True) if kill <= second)
            for second in seconds
        ]

    assert fit_trend(seconds, memory([30, 0, 0])).growth == pytest.approx(0, abs=1e-6)
    assert not fit_trend(seconds, memory([4, 4, 4])).flat
    assert not fit_trend(seconds, memory([30, 30, 30])).flat
