"""Metrics, logs and ``usage`` agree to the token, over many concurrent requests of all types."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from modelmill.core.types import TokenOutput
from tests.serve.service_thread import ServiceThread
from tests.serve.tool_schemas import tool_without_arguments
from tests.wait import wait_until

PROMPTS = [
    "Once upon a time there was a little girl who liked to play in the park with her dog.",
    "Once upon a time there was a little girl who liked to play in the park with her cat. One day",
    "The sun", "Tom and Ben went to the big lake, and there they saw a boat that was old and red",
    "A",
]  # fmt: skip
TALK = [{"role": "user", "content": "Tell me a long story about a bird that cannot fly"}]
TOOL = tool_without_arguments("now")
LEAVES = "leaves"
"""The salt of requests whose clients leave before the end."""
COUNTS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")


def numbers(running: ServiceThread) -> Counter[str]:
    """Every counter of the page that this is about, by its name and what ended answers ended by."""
    counts: Counter[str] = Counter()
    for line in running.get("/metrics").body.decode().splitlines():
        match = re.fullmatch(r"modelmill:(\w+)_total\{(.*)\} (.*)", line)
        if match and match[1] in COUNTS:
            counts[match[1]] = int(float(match[3]))
        elif match and match[1] == "request_success":
            counts[re.findall(r'finished_reason="(\w+)"', match[2])[0]] = int(float(match[3]))
    return counts


def random_requests(count: int) -> Iterator[tuple[str, Any]]:
    """(path, body) of so many requests."""
    draw = random.Random(7)
    plain = {"model": "stories", "temperature": 0}
    for _ in range(count):
        prompt, tokens, stream = draw.choice(PROMPTS), draw.randrange(1, 40), draw.random() < 0.5
        options: dict[str, Any] = {**plain, "max_tokens": tokens}
        if stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        text, chat_body = {**options, "prompt": prompt}, {**options, "messages": TALK}
        warm = {"temperature": 1.0, "seed": draw.randrange(99), "n": draw.randrange(2, 6)}
        stops = {
            "stop": draw.choice([[" the"], [".", "!"], ["e"], [" and", "she"]]),
            "max_tokens": 60,
        }
        ids = {
            "stop_token_ids": draw.sample(range(3, 512), 40),
            "max_tokens": 60,
            "ignore_eos": draw.random() < 0.5,
        }
        yield draw.choice(
            [
                ("/v1/completions", text),
                ("/v1/completions", {**text, **warm}),
                ("/v1/completions", {**text, **stops}),
                ("/v1/completions", {**text, **stops, **warm, "min_tokens": 5}),
                ("/v1/completions", {**text, **ids}),
                ("/v1/completions", {**text, "prompt": draw.sample(PROMPTS, 3), "best_of": 2,
                "n": 2}),
                ("/v1/completions", {**text, "echo": True, "logprobs": 2,
                "max_tokens": draw.choice([0, 3])}),
                ("/v1/chat/completions", chat_body),
                ("/v1/chat/completions", {**chat_body, **stops, **warm}),
                ("/v1/chat/completions", {**chat_body, "response_format": {"type": "json_object"},
                "max_tokens": 9}),
                ("/v1/chat/completions", {
                    **chat_body, "tools": [{"type": "function", "function": TOOL}],
                    "tool_choice": "required", "max_tokens": 60}),
                ("/v1/responses", {**plain, "input": prompt, "max_output_tokens": tokens,
                "stream": stream}),
                ("/v1/embeddings", {"model": "stories", "input": draw.sample(PROMPTS, 2)}),
                ("/v1/embeddings", {"model": "stories", "input": prompt, "pooling": "last"}),
                ("/v1/completions", {**plain, "prompt": prompt, "max_tokens": 400,
                "ignore_eos": True, "stream": True,
                                     "cache_salt": LEAVES, "n": draw.randrange(1, 3)}),
                ("/v1/completions", {**text, "n": 0}),
                ("/v1/completions", {**text, "prompt": "a " * 2000}),
                ("/v1/chat/completions", {**chat_body, "model": "none"}),
            ]
        )  # fmt: skip


class TokenCounts:
    """Usage that clients received, in total and by request id."""

    def __init__(self) -> None:
        # prompt tokens, generated tokens, and cached tokens if reported
        self.usage: dict[str, tuple[int, ...]] = {}
        self.ended: Counter[str] = Counter()
        self.left: list[str] = []

    def add(self, id: str, path: str, body: dict[str, Any], data: bytes) -> None:
        """One answer, whole."""
        if path == "/v1/embeddings":
            event = json.loads(data)
            self.ended["embedding"] += len(event["data"])
            self.usage[id] = event["usage"]["prompt_tokens"], 0
            return
        lines = [data]
        if body.get("stream"):
            lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")]
            assert lines.pop() == b"[DONE]"
        parts = list(map(json.loads, lines))
        if path == "/v1/responses":
            answer = parts[-1].get("response", parts[-1])
            self.ended["stop" if answer["status"] == "completed" else "length"] += 1
            usage = answer["usage"]
            cached = usage["input_tokens_details"]["cached_tokens"]
            self.usage[id] = usage["input_tokens"], usage["output_tokens"], cached
            return
        for choice in (choice for part in parts for choice in part["choices"]):
            reason = choice["finish_reason"]
            self.ended.update({"stop" if reason == "tool_calls" else reason} - {None})
        usage = parts[-1]["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.usage[id] = usage["prompt_tokens"], usage["completion_tokens"], cached


async def send(
    running: ServiceThread, usage_counts: TokenCounts, id: str, path: str, body: dict[str, Any]
) -> None:
    headers = {"x-request-id": id}
    if body.get("cache_salt") != LEAVES:
        response = await running.client.post(path, body, headers=headers)
        if response.status == 200:
            usage_counts.add(id, path, body, response.body)
        return
    async with contextlib.aclosing(
        running.client.parts("POST", path, body, headers=headers)
    ) as parts:
        async for part_type, _ in parts:
            if part_type == "body":
                usage_counts.left.append(id)
                usage_counts.ended["abort"] += body["n"]
                break


def logged(caplog: pytest.LogCaptureFixture) -> dict[str, tuple[int, int, int]]:
    """Counts in the log, by the request's id."""
    lines = [record.data for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    keys = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return {
        line["request_id"]: tuple(line[key] for key in keys) for line in lines if keys[0] in line
    }  # type: ignore[misc]


def idle(running: ServiceThread) -> bool:
    stats = running.run(running.engine.stats())
    return stats is not None and (stats.running, stats.waiting) == (0, 0)


def test_all_counts_agree(
    running: ServiceThread, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "modelmill.serve.access")
    engine, usage_counts, requests = running.engine, TokenCounts(), list(random_requests(200))
    push = engine.generation_client.on_token

    def unended(token: TokenOutput) -> None:
        """However far the worker comes before a client has left, its answer is not heard to the
        end.
        """
        entry = engine.generation_client.active_requests.get(token.request_id)
        if entry is None or entry[0].request.cache_salt != LEAVES or token.finish_reason is None:
            push(token)

    monkeypatch.setattr(engine.generation_client, "on_token", unended)
    before = numbers(running)

    async def all_at_once() -> None:
        await asyncio.gather(
            *(send(running, usage_counts, f"c-{i}", *each) for i, each in enumerate(requests))
        )

    running.run(all_at_once())
    wait_until(lambda: idle(running))
    after = numbers(running)
    after.subtract(before)
    lines = {id: counts for id, counts in logged(caplog).items() if id.startswith("c-")}
    assert {
        id: lines[id][: len(usage)] for id, usage in usage_counts.usage.items()
    } == usage_counts.usage
    assert lines.keys() == {*usage_counts.usage, *usage_counts.left}
    prompt, written, cached = (sum(column) for column in zip(*lines.values()))
    assert [after[name] for name in COUNTS] == [prompt, written, prompt, cached]
    reasons = {name: count for name, count in after.items() if name not in COUNTS and count}
    assert reasons == dict(usage_counts.ended)
    assert set(reasons) == {"stop", "length", "abort", "embedding"}
    assert min(prompt, written, cached) > 100, "nothing here is only zeros"


def test_what_broke_off_with_its_worker_is_an_error(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that were under way when their engine ended, and requests that it had no memory
    for.
    """
    before = numbers(running)
    engine = running.engine
    monkeypatch.setattr(engine, "_send", lambda _: None)

    async def lost_status() -> int:
        body = {"model": "stories", "prompt": "Once", "n": 3, "max_tokens": 5}
        random_requests = asyncio.create_task(running.client.post("/v1/completions", body))
        while not engine.generation_client.active_requests:
            await asyncio.sleep(0)
        engine.generation_client.active_requests[
            next(iter(engine.generation_client.active_requests))
        ][1].fail(engine.worker_lost_error())
        return (await random_requests).status

    assert running.run(lost_status()) == 503
    monkeypatch.undo()
    after = numbers(running)
    after.subtract(before)
    assert {name: count for name, count in after.items() if count} == {"error": 3}
