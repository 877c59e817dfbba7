"""Measure the overhead of serving: streams through the API against the engine core alone.

    python -m benchmarks.serving_load ENGINE [--streams 16] [--rounds 6] [--burst 12] [--json FILE]

Two sides take turns, in the other order every round, each with the engine on one core: the loop in
a process of its own, and ``modelmill serve`` whose worker is pinned to that core, with the API and
the client on the other. A round is the same requests on both; its ratio is served output per second
over the loop's. The CPU seconds of the loop over those of the worker show the same, independent of
other programs. ``--burst`` adds long prompts while answers run, and reports the gaps
between tokens before and during it, and the loop's own steps (on a CPU in CPU time, so that
it may be busy with other things). On a GPU (--device cuda) the cores are for Python alone:
use three of them, so that a client of thousands of tokens per second does not slow down the API.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.serving_processes import CoreProcess, ServedEngine
from modelmill.eval.openai_client import OpenAIClient
from modelmill.eval.report import quantile

MIN_ROUNDS, MAX_TOKEN_ID = 5, 30000
SETTLE_SECONDS = 0.3
"""Seconds of silence before each side, so that no side computes while the other is measured."""


@dataclass(frozen=True)
class LoadPlan:
    """Load plan: streams at once with prompt and answer lengths, and the long prompts of a burst.

    beside: tokens of the answers that run during a burst.
    """

    streams: int
    prompt: int
    tokens: int
    burst: int
    long: int
    seed: int
    vocab: int
    beside: int = 0

    def prompts(self, round: int, count: int, length: int) -> list[list[int]]:
        """Ids that no round shares with another: nothing is found in the prefix cache."""
        rng = random.Random(f"{self.seed} {round} {length}")
        return [
            [rng.randrange(MIN_ROUNDS, min(MAX_TOKEN_ID, self.vocab)) for _ in range(length)]
            for _ in range(count)
        ]


async def time_stream(remote: OpenAIClient, prompt: list[int], tokens: int) -> list[float]:
    """When each token of one answer came; several in one event came at once."""
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    times: list[float] = []
    async for when, event in remote.stream("/v1/completions", {**body, "model": "load"}):
        for choice in event.get("choices", ()):
            times += [when] * len(choice.get("token_ids", ()))
    if len(times) != tokens:
        raise RuntimeError(f"{len(times)} tokens, expected {tokens}")
    return times


async def time_streams(
    remote: OpenAIClient, prompts: Sequence[list[int]], tokens: int
) -> dict[str, float]:
    """Return seconds to the last token and to the last first token, and the longest gap."""
    began = time.perf_counter()
    token_times = await asyncio.gather(*(time_stream(remote, prompt, tokens) for prompt in prompts))
    seconds = time.perf_counter() - began
    gap = max((b - a for times in token_times for a, b in pairwise(times)), default=0.0)
    return {
        "served_s": seconds,
        "last_first_s": max(times[0] for times in token_times) - began,
        "longest_gap_s": gap,
    }


async def burst(remote: OpenAIClient, plan: LoadPlan, round: int) -> dict[str, list[float]]:
    """Gaps in ms of running answers before long prompts come and while they are computed."""
    running = plan.prompts(1000 + round, plan.streams, plan.prompt)
    long = plan.prompts(2000 + round, plan.burst, plan.long)
    answers = [
        asyncio.create_task(time_stream(remote, prompt, plan.beside or 4 * plan.tokens))
        for prompt in running
    ]
    await asyncio.sleep(0)
    # a third of the answers' time is quiet
    await asyncio.sleep(await quiet_seconds(remote, plan))
    begin = time.perf_counter()
    firsts = await asyncio.gather(*(time_stream(remote, prompt, 1) for prompt in long))
    end = max(times[0] for times in firsts)
    token_times = await asyncio.gather(*answers)
    quiet: list[float] = []
    during: list[float] = []
    for times in token_times:
        for a, b in pairwise(times):
            if b < begin:
                quiet.append(1000 * (b - a))
            elif a < end:
                during.append(1000 * (b - a))
    return {
        "quiet": quiet,
        "during": during,
        "first": [1000 * (times[0] - begin) for times in firsts],
    }


async def quiet_seconds(remote: OpenAIClient, plan: LoadPlan) -> float:
    """Return seconds of the quiet phase before a burst: a few tokens of another running answer."""
    times = await time_stream(remote, plan.prompts(3000, 1, plan.prompt)[0], 16)
    return max(0.2, 2 * (times[-1] - times[0]))


def run_round(
    plan: LoadPlan, round: int, core_process: CoreProcess, server: ServedEngine
) -> dict[str, float]:
    """Both sides once; which is first changes with each round."""
    prompts = plan.prompts(round, plan.streams, plan.prompt)
    figures: dict[str, float] = {}

    def loop() -> None:
        time.sleep(SETTLE_SECONDS)
        figures["alone_s"], figures["alone_cpu_s"] = core_process.generate(prompts, plan.tokens)

    def serve() -> None:
        time.sleep(SETTLE_SECONDS)
        before = server.cpu()
        figures.update(asyncio.run(time_streams(server.client, prompts, plan.tokens)))
        for name, seconds in server.cpu().items():
            figures[f"{name}_cpu_s"] = seconds - before[name]

    for side in (loop, serve) if round % 2 else (serve, loop):
        side()
    return figures


def median_min_max(values: Sequence[float]) -> dict[str, float]:
    """Median, least, most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def quantile_at(values: Sequence[float], share: float) -> float:
    """A quantile."""
    return quantile(sorted(values), share)


def step_figures(bursts: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """The loop's own steps, in ms, without long prompts and with them."""
    quiet, during = (
        [1000 * each for each_burst in bursts for each in each_burst[name]]
        for name in ("quiet", "during")
    )
    median = quantile_at(quiet, 0.5)
    figures = {
        "quiet_median_ms": median,
        "quiet_p99_ms": quantile_at(quiet, 0.99),
        "during_median_ms": quantile_at(during, 0.5),
    }
    figures |= {
        "during_p99_ms": quantile_at(during, 0.99),
        "p99_over_quiet_median": quantile_at(during, 0.99) / median,
    }
    return figures | {
        "rounds": [
            quantile_at(each["during"], 0.99) / quantile_at(each["quiet"], 0.5) for each in bursts
        ]
    }


def summary(
    plan: LoadPlan, rounds: Sequence[dict[str, float]], bursts: Sequence[dict[str, list[float]]]
) -> dict[str, Any]:
    """The figures of all rounds."""
    tokens = plan.streams * plan.tokens
    result: dict[str, Any] = {
        "alone_tokens_per_s": median_min_max([tokens / each["alone_s"] for each in rounds]),
        "served_tokens_per_s": median_min_max([tokens / each["served_s"] for each in rounds]),
        "ratio": median_min_max([each["alone_s"] / each["served_s"] for each in rounds]),
        "cpu_ratio": median_min_max(
            [each["alone_cpu_s"] / each["worker_cpu_s"] for each in rounds]
        ),
        "api_us_per_token": median_min_max([1e6 * each["api_cpu_s"] / tokens for each in rounds]),
        "client_us_per_token": median_min_max(
            [1e6 * each["client_cpu_s"] / tokens for each in rounds]
        ),
    }
    if bursts:
        quiet = [gap for each in bursts for gap in each["quiet"]]
        during = [gap for each in bursts for gap in each["during"]]
        if not quiet or not during:
            raise RuntimeError(
                "the running answers had ended before the burst: give more --tokens or --streams"
            )
        result["burst"] = {
            "quiet_median_ms": quantile_at(quiet, 0.5),
            "quiet_p99_ms": quantile_at(quiet, 0.99),
            "during_median_ms": quantile_at(during, 0.5),
            "during_p99_ms": quantile_at(during, 0.99),
            "p99_over_quiet_median": quantile_at(during, 0.99) / quantile_at(quiet, 0.5),
            "rounds": [
                quantile_at(each["during"], 0.99) / quantile_at(each["quiet"], 0.5)
                for each in bursts
            ],
            "first_token_ms": quantile_at([t for each in bursts for t in each["first"]], 0.5),
        }
    return result


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="ids of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--burst", type=int, default=0, help="long prompts that join; 0: none")
    parser.add_argument(
        "--beside",
        type=int,
        default=0,
        help="tokens of answers during a burst; 0: four times --tokens",
    )
    parser.add_argument("--long", type=int, default=1024, help="ids of a long prompt")
    parser.add_argument(
        "--cores",
        type=int,
        nargs="+",
        default=(0, 1),
        help="of the engine, of the API, and of the client: as the API",
    )
    parser.add_argument("--kv-cache-bytes", type=int, default=1 << 30, help="of either side")
    parser.add_argument("--threads", type=int, default=1, help="the engine's, all on its core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Measure and print."""
    args = parse_args()
    engine_core, api_core = args.cores[:2]
    os.sched_setaffinity(0, {args.cores[-1]})
    run = {"device": args.device, "threads": args.threads, "max_num_seqs": 2 * max(args.streams, 8)}
    run |= {"kv_cache_bytes": args.kv_cache_bytes}
    alone = CoreProcess(args.engine, run, engine_core)
    served = ServedEngine(args.engine, run, engine_core, api_core)
    try:
        vocab = alone.ready()
        plan = LoadPlan(
            args.streams,
            args.prompt,
            args.tokens,
            args.burst,
            args.long,
            args.seed,
            vocab,
            args.beside,
        )
        served.ready()
        rounds: list[dict[str, float]] = []
        bursts: list[dict[str, list[float]]] = []
        inner: list[dict[str, list[float]]] = []
        run_round(replace(plan, tokens=min(plan.tokens, 128)), -1, alone, served)  # both warm
        if plan.burst:
            asyncio.run(burst(served.client, plan, -1))
        for round in range(args.rounds):
            rounds.append(run_round(plan, round, alone, served))
            last = rounds[-1]
            print(
                f"round {round + 1}: {last['alone_s'] / last['served_s']:.4f} of the loop's output",
                file=sys.stderr,
            )
            print(json.dumps(last), file=sys.stderr, flush=True)
            if plan.burst:
                bursts.append(asyncio.run(burst(served.client, plan, round)))
                long = plan.prompts(2500 + round, plan.burst, plan.long)
                inner.append(
                    alone.burst(plan.prompts(1500 + round, plan.streams, plan.prompt), long)
                )
                burst_figures = {
                    "served": summary(plan, rounds, bursts[-1:])["burst"],
                    "steps": step_figures(inner[-1:]),
                }
                print(json.dumps(burst_figures), file=sys.stderr, flush=True)
        result = {
            "engine": args.engine.name,
            "device": args.device,
            "streams": args.streams,
            "prompt": args.prompt,
        }
        result |= {"tokens": args.tokens, "rounds": args.rounds, **summary(plan, rounds, bursts)}
        if inner:
            result["burst_steps"] = step_figures(inner)
    finally:
        served.close()
        alone.close()
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps({**result, "each": rounds}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
