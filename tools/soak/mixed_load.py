"""Mixed load for minutes: chats, completions, structured output, tool calls, masks, disconnects.

Hostile requests are mixed in.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from modelmill.core.progress_callback import Progress
from tools.soak import segment_requests
from tools.soak.client import disconnect_mid_stream, send_request
from tools.soak.hostile_requests import random_request, response_problem
from tools.soak.memory_trend import fit_trend
from tools.soak.server import SoakFailure, SoakServer

WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
RequestSpec = tuple[str, dict[str, Any]]


def _random_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _random_chat(rng: random.Random) -> dict[str, Any]:
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": _random_words(rng, rng.randint(1, 12))}
        for i in range(3)
    ]
    return {
        "messages": turns[: rng.choice((1, 3))],
        "max_tokens": rng.randint(1, 40),
        "seed": rng.randrange(99),
    }


def chat(rng: random.Random) -> RequestSpec:
    """A chat completion, streamed or not."""
    return "/v1/chat/completions", {**_random_chat(rng), "stream": rng.random() < 0.5}


def completion(rng: random.Random) -> RequestSpec:
    """Several prompts and choices, log-probabilities, echo."""
    body: dict[str, Any] = {
        "prompt": [_random_words(rng, rng.randint(1, 40)) for _ in range(rng.choice((1, 1, 3)))]
    }
    body |= {
        "n": rng.choice((1, 2)),
        "max_tokens": rng.randint(1, 40),
        "logprobs": rng.choice((None, 3)),
    }
    body |= {
        "echo": rng.random() < 0.2,
        "stream": rng.random() < 0.5,
        "stop": rng.choice((None, "the")),
    }
    return "/v1/completions", body


def structured_output(rng: random.Random) -> RequestSpec:
    """A JSON schema; one in three is new."""
    name = rng.choice(("a", "b", f"k{rng.randrange(10**9)}"))
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": [name],
    }
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": schema, "strict": True},
    }
    return "/v1/chat/completions", {
        **_random_chat(rng),
        "response_format": response_format,
        "max_tokens": 30,
    }


def tool_call(rng: random.Random) -> RequestSpec:
    """A function that may or must be called."""
    choice = rng.choice(("auto", "required"))
    return "/v1/chat/completions", {
        **_random_chat(rng),
        "tools": [TOOL],
        "tool_choice": choice,
        "stream": rng.random() < 0.5,
    }


def segment(rng: random.Random) -> RequestSpec:
    """Points, boxes or all objects of an image."""
    return segment_requests.PATH, segment_requests.valid_request(rng)


REQUEST_TYPES: dict[str, tuple[int, Callable[[random.Random], RequestSpec]]] = {
    "chat": (4, chat),
    "completion": (4, completion),
    "structured": (2, structured_output),
    "tools": (1, tool_call),
}
SEGMENT_KINDS = {"segment": (2, segment)}
"""Added if an engine is served that segments."""
DISCONNECT_WEIGHT, HOSTILE_WEIGHT = 2, 3


async def send_one(
    server: SoakServer, rng: random.Random, counts: Counter[str], times: list[float]
) -> None:
    """Send one random request.

    Raises:
        SoakFailure: the response is not allowed.
    """
    request_types = (
        REQUEST_TYPES if server.segment_model is None else {**REQUEST_TYPES, **SEGMENT_KINDS}
    )
    name = rng.choices(
        [*request_types, "left", "bad"],
        [weight for weight, _ in request_types.values()] + [DISCONNECT_WEIGHT, HOSTILE_WEIGHT],
    )[0]
    started_at = time.monotonic()
    if name == "bad":
        path, data = random_request(rng, server.model, server.segment_model)
        status, body = await send_request(server, path, data)
        problem = response_problem(status, body)
    elif name == "left":
        path, spec = chat(rng)
        spec |= {"model": server.model, "stream": True, "max_tokens": 200}
        await disconnect_mid_stream(server, path, spec, rng.randrange(4), reset=rng.random() < 0.5)
        problem = None
    else:
        path, spec = request_types[name][1](rng)
        data = json.dumps(
            {**spec, "model": server.segment_model if name in SEGMENT_KINDS else server.model}
        ).encode()
        status, body = await send_request(server, path, data)
        complete = not spec.get("stream") or b"data: [DONE]" in body
        valid = (
            (status == 200 and complete) or status == 429 or b'"context_length_exceeded"' in body
        )
        problem = None if valid else f"status {status}, {body[-200:]!r}"
        times.append(time.monotonic() - started_at)
    if problem is not None:
        raise SoakFailure(f"{name}: {problem}: {data[:500]!r}")
    counts[name] += 1


def run_mixed_load(
    server: SoakServer,
    minutes: float,
    seed: int,
    on_progress: Progress,
    clients: int = 8,
) -> dict[str, Any]:
    """Run ``clients`` in parallel for ``minutes``."""
    workers_before = {each.pid for each in server.workers()}
    counts: Counter[str] = Counter()
    times: list[float] = []
    series: list[tuple[float, float, float]] = []
    started_at, end = time.monotonic(), time.monotonic() + 60 * minutes

    async def client(index: int) -> None:
        rng = random.Random(f"{seed} {index}")
        while time.monotonic() < end:
            await send_one(server, rng, counts, times)

    async def watch() -> None:
        pause = max(0.2, 60 * minutes / 240)
        while time.monotonic() < end:
            memory = server.memory()
            series.append((time.monotonic() - started_at, memory["api"], memory["worker"]))
            on_progress("seconds", int(time.monotonic() - started_at), int(60 * minutes))
            await asyncio.sleep(pause)

    async def everything() -> None:
        await asyncio.gather(watch(), *(client(index) for index in range(clients)))

    asyncio.run(everything())
    gauges = server.wait_until_idle()
    if {each.pid for each in server.workers()} != workers_before:
        raise SoakFailure("a worker was replaced")
    seconds, api, workers = (list(column) for column in zip(*series, strict=True))
    lines = {"api": fit_trend(seconds, api), "worker": fit_trend(seconds, workers)}
    ordered = sorted(times)
    return {
        "what": f"{minutes:g} minutes of mixed load, {clients} clients",
        "ok": all(line.flat for line in lines.values()),
        "requests": dict(sorted(counts.items())),
        "seconds_median": round(ordered[len(ordered) // 2], 3),
        "seconds_p99": round(ordered[int(0.99 * len(ordered))], 3),
        "after": gauges,
        "memory": {name: asdict(line) for name, line in lines.items()},
        "series": series,
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot resident memory over time, with the fitted lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seconds, api, worker = (list(column) for column in zip(*result["series"], strict=True))
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), constrained_layout=True)
    for index, (name, values) in enumerate({"api": api, "worker": worker}.items()):
        line = result["memory"][name]
        axes[index].plot([each / 60 for each in seconds], values)
        axes[index].set_title(
            f"{name}: {line['per_minute']:+.3f} MB a minute over the last two thirds", fontsize=9
        )
        axes[index].set_xlabel("minutes")
        axes[index].set_ylabel("resident MB")
        axes[index].set_ylim(0, 1.2 * max(values))
    figure.suptitle(result["what"], fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
