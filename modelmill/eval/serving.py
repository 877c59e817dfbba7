"""Load on a server: requests come at a rate, or so many at once; what each of them saw."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from modelmill.core.errors import ModelmillError
from modelmill.eval.remote import Remote, Visit, visit
from modelmill.eval.report import quantile

WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father"""
# most vocabularies hold each of them as one token


@dataclass(frozen=True)
class Load:
    """lengths: (words of a prompt, tokens of its answer) of each request. rate: requests a second on average, arriving
    by chance; None: all at once. concurrency: most at a time. first_ms, token_ms: a good request is not slower.
    chat: a prompt is a message. ignore_eos: answers are asked for in full length, which is no field of OpenAI's own.
    """

    lengths: Sequence[tuple[int, int]]
    rate: float | None = None
    concurrency: int | None = None
    first_ms: float | None = None
    token_ms: float | None = None
    seed: int = 0
    chat: bool = False
    ignore_eos: bool = True


async def run(remote: Remote, model: str, load: Load, done: Callable[[int, int], None]) -> tuple[list[Visit], float]:
    """All requests; returns what each saw and the seconds of all. done: (ended, of)."""
    rng, words = random.Random(load.seed), WORDS.split()
    slots = asyncio.Semaphore(load.concurrency or len(load.lengths))
    ended = 0
    began = time.perf_counter()

    async def one(prompt: str, tokens: int, after: float) -> Visit:
        nonlocal ended
        await asyncio.sleep(max(0.0, began + after - time.perf_counter()))
        async with slots:
            found = await visit(
                remote, body_of(load, model, prompt, tokens), "chat/completions" if load.chat else "completions"
            )
        ended += 1
        done(ended, len(load.lengths))
        return found

    at, tasks = 0.0, []
    for count, tokens in load.lengths:
        prompt = " ".join(rng.choice(words) for _ in range(max(count, 1)))
        tasks.append(asyncio.create_task(one(prompt, tokens, at)))
        at += rng.expovariate(load.rate) if load.rate else 0.0
    visits = await asyncio.gather(*tasks)
    return visits, time.perf_counter() - began


def body_of(load: Load, model: str, prompt: str, tokens: int) -> dict[str, Any]:
    """A request's fields."""
    asked: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0}
    asked |= {"messages": [{"role": "user", "content": prompt}]} if load.chat else {"prompt": prompt}
    return {**asked, "ignore_eos": True} if load.ignore_eos else asked


def goodput(visits: Sequence[Visit], seconds: float, first_ms: float | None, token_ms: float | None) -> float:
    """Requests a second that were within the limits."""
    met = [each for each in visits if each.error is None and _meets(each, first_ms, token_ms)]
    return len(met) / seconds


def summary(visits: Sequence[Visit], seconds: float, load: Load) -> dict[str, Any]:
    """Medians, p90 and p99 in milliseconds, rates, goodput. Raises ModelmillError where nothing succeeded."""
    good = [each for each in visits if each.error is None]
    if not good:
        raise ModelmillError(f"none of {len(visits)} requests was answered: {visits[0].error}")
    per_token = [each.per_token for each in good if each.per_token is not None]
    tokens = sum(each.output_tokens for each in good)
    limited = load.first_ms is not None or load.token_ms is not None
    return {
        "requests": len(visits),
        "failed": len(visits) - len(good),
        "errors": sorted({each.error for each in visits if each.error})[:5],
        "seconds": seconds,
        "prompt_tokens": sum(each.prompt_tokens for each in good),
        "output_tokens": tokens,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "first_token_ms": spread([each.first for each in good]),
        "per_token_ms": spread(per_token),
        "between_pieces_ms": spread([gap for each in good for gap in each.gaps]),
        "whole_ms": spread([each.whole for each in good]),
        "good_requests_per_s": goodput(good, seconds, load.first_ms, load.token_ms) if limited else None,
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """mean, median, p90 and p99 in milliseconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return 1000 * quantile(ordered, share)

    return {"mean": 1000 * sum(ordered) / len(ordered), "median": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def _meets(found: Visit, first_ms: float | None, token_ms: float | None) -> bool:
    slow_first = first_ms is not None and 1000 * found.first > first_ms
    slow_token = token_ms is not None and 1000 * (found.per_token or 0.0) > token_ms
    return not (slow_first or slow_token)
