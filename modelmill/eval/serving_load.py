"""Load on a server: requests at a given rate or concurrency, and their measured times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.core.errors import ModelmillError
from modelmill.core.progress_callback import Progress
from modelmill.eval.openai_client import OpenAIClient, RequestTiming, time_request
from modelmill.eval.report import quantile

PROMPT_WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father"""  # noqa: E501
# each of them is one token in most vocabularies


@dataclass(frozen=True)
class ServingLoad:
    """The load of a serving benchmark.

    lengths: (words of the prompt, tokens of the answer) of each request. rate: mean requests per
    second with Poisson arrivals; None: all at once. concurrency: most requests at a time. first_ms,
    token_ms: limits of a good request. chat: send the prompt as a chat message. ignore_eos:
    generate answers of full length (an extension of OpenAI's API).
    """

    lengths: Sequence[tuple[int, int]]
    rate: float | None = None
    concurrency: int | None = None
    first_ms: float | None = None
    token_ms: float | None = None
    seed: int = 0
    chat: bool = False
    ignore_eos: bool = True


async def run_serving_load(
    client: OpenAIClient, model: str, load: ServingLoad, on_progress: Progress
) -> tuple[list[RequestTiming], float]:
    """Send all requests; return their timings and the total seconds.

    ``on_progress`` is called with ("requests", ended, number of requests).
    """
    rng, words = random.Random(load.seed), PROMPT_WORDS.split()
    slots = asyncio.Semaphore(load.concurrency or len(load.lengths))
    ended = 0
    began = time.perf_counter()

    async def send(prompt: str, tokens: int, delay: float) -> RequestTiming:
        nonlocal ended
        await asyncio.sleep(max(0.0, began + delay - time.perf_counter()))
        async with slots:
            timing = await time_request(
                client,
                request_body(load, model, prompt, tokens),
                "chat/completions" if load.chat else "completions",
            )
        ended += 1
        on_progress("requests", ended, len(load.lengths))
        return timing

    arrival, tasks = 0.0, []
    for count, tokens in load.lengths:
        prompt = " ".join(rng.choice(words) for _ in range(max(count, 1)))
        tasks.append(asyncio.create_task(send(prompt, tokens, arrival)))
        arrival += rng.expovariate(load.rate) if load.rate else 0.0
    timings = await asyncio.gather(*tasks)
    return timings, time.perf_counter() - began


def request_body(load: ServingLoad, model: str, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the JSON fields of a request."""
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": prompt}]} if load.chat else {"prompt": prompt}
    return {**body, "ignore_eos": True} if load.ignore_eos else body


def goodput(
    timings: Sequence[RequestTiming], seconds: float, first_ms: float | None, token_ms: float | None
) -> float:
    """Requests per second that were within the limits."""
    met = [
        each
        for each in timings
        if each.error is None and _meets_latency_limits(each, first_ms, token_ms)
    ]
    return len(met) / seconds


def summarize_load(
    timings: Sequence[RequestTiming], seconds: float, load: ServingLoad
) -> dict[str, Any]:
    """Summarize latencies in milliseconds (mean, median, p90, p99), rates and goodput.

    Raises:
        ModelmillError: if no request succeeded.
    """
    good = [each for each in timings if each.error is None]
    if not good:
        raise ModelmillError(f"all {len(timings)} requests failed: {timings[0].error}")
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
    """Mean, median, p90 and p99 in milliseconds; None for no values."""
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


def _meets_latency_limits(
    timing: RequestTiming, first_ms: float | None, token_ms: float | None
) -> bool:
    slow_first = first_ms is not None and 1000 * timing.first_token_seconds > first_ms
    slow_token = token_ms is not None and 1000 * (timing.seconds_per_token or 0.0) > token_ms
    return not (slow_first or slow_token)
