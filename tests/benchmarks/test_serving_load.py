"""The figures of served output against the loop's, from rounds that are known."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from benchmarks.serving_load import LoadPlan, quantile_at, step_figures, summary, time_stream
from benchmarks.serving_processes import QUIET_STEPS, _burst
from modelmill.eval.openai_client import OpenAIClient
from tests.runtime import tiny

PLAN = LoadPlan(streams=4, prompt=8, tokens=10, burst=2, long=32, seed=0, vocab=500)


def test_no_round_shares_its_prompts_with_another() -> None:
    made = [PLAN.prompts(round, 4, 8) for round in range(20)]
    assert made == [PLAN.prompts(round, 4, 8) for round in range(20)]
    firsts = {tuple(prompt) for prompts in made for prompt in prompts}
    assert len(firsts) == 80
    assert all(5 <= id < 500 for prompt in firsts for id in prompt)


def each(alone: float, served: float, cpu: float = 1.0) -> dict[str, float]:
    times = {"alone_s": alone, "served_s": served, "alone_cpu_s": cpu, "worker_cpu_s": 1.0}
    return {**times, "api_cpu_s": 0.004, "client_cpu_s": 0.002}


def test_ratios_are_of_rounds_and_not_of_medians() -> None:
    """A machine that slows down from round to round changes no ratio."""
    report = summary(PLAN, [each(1.0, 1.0), each(2.0, 2.5, 0.9), each(4.0, 4.4)], [])
    assert report["ratio"] == {
        "median": pytest.approx(4 / 4.4),
        "min": pytest.approx(0.8),
        "max": 1.0,
    }
    assert report["cpu_ratio"]["min"] == pytest.approx(0.9)
    assert report["alone_tokens_per_s"]["median"] == pytest.approx(20)
    assert report["api_us_per_token"]["median"] == pytest.approx(100)
    assert "burst" not in report


def test_a_burst_is_measured_by_its_slowest_gaps_over_the_quiet_median() -> None:
    gaps = {"quiet": [10.0] * 99 + [50.0], "during": [20.0] * 98 + [28.0] * 2, "first": [100.0]}
    report = summary(PLAN, [each(1.0, 1.0)], [gaps])["burst"]
    assert report["quiet_median_ms"] == 10.0
    assert report["during_p99_ms"] == quantile_at(gaps["during"], 0.99) == 28.0
    assert report["p99_over_quiet_median"] == pytest.approx(2.8)
    assert report["rounds"] == [pytest.approx(2.8)]


@pytest.mark.parametrize("tokens", [3, 4])
def test_each_token_has_its_time(tokens: int) -> None:
    """Two tokens in one event came at once; an answer of another length is an error."""
    events: list[dict[str, Any]] = [
        {"choices": [{"token_ids": [7, 8]}]},
        {"choices": [{"token_ids": [9]}]},
    ]
    body = (
        b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        + b"data: [DONE]\n\n"
    )

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    async def main() -> list[float]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            return await time_stream(
                OpenAIClient.from_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"),
                [5, 6],
                tokens,
            )
        finally:
            server.close()

    if tokens != 3:
        with pytest.raises(RuntimeError, match="3 tokens, expected 4"):
            asyncio.run(main())
        return
    times = asyncio.run(main())
    assert len(times) == 3
    assert times[0] == times[1]


def test_steps_of_a_burst_are_reported_beside_quiet_ones() -> None:
    quiet = [0.010] * 60
    figures = step_figures(
        [
            {"quiet": quiet, "during": [0.020] * 98 + [0.025, 0.030]},
            {"quiet": quiet, "during": [0.030]},
        ]
    )
    assert figures["quiet_median_ms"] == pytest.approx(10)
    assert figures["during_median_ms"] == pytest.approx(20)
    assert figures["rounds"] == pytest.approx([2.505, 3.0])


def test_a_burst_is_scheduled_as_a_server_does_and_leaves_the_loop_as_it_was() -> None:
    loop = tiny.make_engine(tiny.decoder(max_len=512), max_num_batched_tokens=512)
    before = loop.scheduler.limits
    step_times = _burst(
        loop, "x", [[5, 6, 7 + i] for i in range(4)], [list(range(5, 60)), list(range(60, 4, -1))]
    )
    assert len(step_times["quiet"]) == QUIET_STEPS
    # 111 tokens in pieces: more than a step, far less than one a token
    assert 2 < len(step_times["during"]) < 60
    assert min(step_times["quiet"] + step_times["during"]) > 0
    assert (loop.scheduler.limits, loop.scheduler.adaptive_chunk) == (before, None)
    tiny.assert_idle(loop)
