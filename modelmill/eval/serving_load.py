"""Load on a server: requests come at a rate, or so many at once; what each of them saw."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.core.errors import ModelmillError
from modelmill.eval.openai_client import OpenAIClient, RequestTiming, time_request
from modelmill.eval.report import quantile

WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father"""  # noqa: E501
# most vocabularies hold each of them as one token


@dataclass(frozen=True)
class ServingLoad:
    """lengths: (words of a prompt, tokens of its answer) of each request. rate: requests a second
    on average, arriving by chance; None: all at once. concurrency: most at a time. first_ms,
    token_ms: a good request is not slower.
    chat: a prompt is a message. ignore_eos: answers are asked for in full length, which is no field
    of OpenAI's own."""

    lengths: Sequence[tuple[int, int]]
    rate: float | None = None
    concurrency: int | None = None
    first_ms: float | None = None
    token_ms: float | None = None
    seed: int = 0
    chat: bool = False
    ignore_eos: bool = True


async def run_load(
    client: OpenAIClient, model: str, load: ServingLoad, on_progress: Callable[[int, int], None]
) -> tuple[list[RequestTiming], float]:
    """All requests; returns what each saw and the seconds of all. on_progress: (ended, of)."""
    rng, words = random.Random(load.seed), WORDS.split()
    slots = asyncio.Semaphore(load.concurrency or len(load.lengths))
    ended = 0
    began = time.perf_counter()

    async def one(prompt: str, tokens: int, after: float) -> RequestTiming:
        nonlocal ended
        await asyncio.sleep(max(0.0, began + after - time.perf_counter()))
        async with slots:
            found = await time_request(
                client,
                request_body(load, model, prompt, tokens),
                "chat/completions" if load.chat else "completions",
            )
        ended += 1
        on_progress(ended, len(load.lengths))
        return found

    at, tasks = 0.0, []
    for count, tokens in load.lengths:
        prompt = " ".join(rng.choice(words) for _ in range(max(count, 1)))
        tasks.append(asyncio.create_task(one(prompt, tokens, at)))
        at += rng.expovariate(load.rate) if load.rate else 0.0
    visits = await asyncio.gather(*tasks)
    return visits, time.perf_counter() - began


def request_body(load: ServingLoad, model: str, prompt: str, tokens: int) -> dict[str, Any]:
    """A request's fields."""
    asked: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0}
    asked |= (
        {"messages": [{"role": "user", "content": prompt}]} if load.chat else {"prompt": prompt}
    )
    return {**asked, "ignore_eos": True} if load.ignore_eos else asked


def goodput(
    timings: Sequence[RequestTiming], seconds: float, first_ms: float | None, token_ms: float | None
) -> float:
    """Requests a second that were within the limits."""
    met = [
        each for each in timings if each.error is None and _meets_limits(each, first_ms, token_ms)
    ]
    return len(met) / seconds


def summarize_load(
    timings: Sequence[RequestTiming], seconds: float, load: ServingLoad
) -> dict[str, Any]:
    """Medians, p90 and p99 in milliseconds, rates, goodput.

    Raises ModelmillError where nothing succeeded.
    """
    good = [each for each in timings if each.error is None]
    if not good:
        raise ModelmillError(f"none of {len(timings)} requests was answered: {timings[0].error}")
    per_token = [each.seconds_per_token for each in good if each.seconds_per_token is not None]
    tokens = sum(each.output_tokens for each in good)
    limited = load.first_ms is not None or load.token_ms is not None
    return {
        "requests": len(timings),
        "failed": len(timings) - len(good),
        "errors": sorted({each.error for each in timings if each.error})[:5],
        "seconds": seconds,
        "prompt_tokens": sum(each.prompt_tokens for each in good),
        "output_tokens": tokens,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "first_token_ms": percentiles_ms([each.first_token_seconds for each in good]),
        "per_token_ms": percentiles_ms(per_token),
        "between_pieces_ms": percentiles_ms([gap for each in good for gap in each.chunk_gaps]),
        "whole_ms": percentiles_ms([each.total_seconds for each in good]),
        "good_requests_per_s": goodput(good, seconds, load.first_ms, load.token_ms)
        if limited
        else None,
    }


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """mean, median, p90 and p99 in milliseconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return 1000 * quantile(ordered, share)

    return {
        "mean": 1000 * sum(ordered) / len(ordered),
        "median": at(0.5),
        "p90": at(0.9),
        "p99": at(0.99),
    }


def _meets_limits(timing: RequestTiming, first_ms: float | None, token_ms: float | None) -> bool:
    slow_first = first_ms is not None and 1000 * timing.first_token_seconds > first_ms
    slow_token = token_ms is not None and 1000 * (timing.seconds_per_token or 0.0) > token_ms
    return not (slow_first or slow_token)
