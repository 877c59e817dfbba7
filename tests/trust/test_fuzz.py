"""Requests made of hostile parts at random: an answer or a refusal in its form, never a bug, and the engine goes on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelmill.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.serve.asgi import Response
from tests.serve.conftest import stories  # noqa: F401  the engine that tests of the server share
from tests.serve.running import Running
from tests.trust.test_serving import idle

KINDS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
COUNT = 600


@pytest.fixture(scope="module")
def running(stories: Path) -> Iterator[Running]:  # noqa: F811
    service = Running(stories)
    yield service
    service.close()


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON, mostly small, often wrong."""
    plain: list[Any] = [
        None, True, False, 0, 1, -1, 2, 3, 7, 0.0, -0.0, 0.5, 1.5, 2**31, 2**63, -(2**70), 1e308, "", "a", "\u0000",
        "\ud800", "é" * 9, "<s></s>", "x" * 3000, "{{ 7 * 7 }}", "../../etc/passwd", [], {}, "stories", "auto",
        "required", "text", "json_object", "json_schema", "function", "user", "assistant", "system", "tool", "Once",
    ]  # fmt: skip
    if depth > 3 or rng.random() < 0.6:
        return rng.choice(plain)
    if rng.random() < 0.5:
        return [value(rng, depth + 1) for _ in range(rng.choice((1, 2, 3, 40)))]
    keys = [
        "type",
        "role",
        "content",
        "name",
        "function",
        "json_schema",
        "schema",
        "regex",
        "choice",
        "json",
        "1",
        "403",
    ]
    return {rng.choice(keys): value(rng, depth + 1) for _ in range(rng.choice((1, 2, 3)))}


def request(rng: random.Random) -> tuple[str, bytes]:
    """A request that would be fine, with some fields changed, added or cut."""
    path = rng.choice(list(KINDS))
    body: dict[str, Any] = {"model": "stories", "max_tokens": 3}
    if path == "/v1/completions":
        body["prompt"] = "Once upon a time"
    elif path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "hello"}]
    else:
        body = {"tokens": [1, 403]} if path == "/detokenize" else {"prompt": "hello"}
    fields = list(KINDS[path].model_fields)
    for _ in range(rng.choice((1, 1, 2, 3))):
        body[rng.choice(fields)] = value(rng)
    if rng.random() < 0.3 and "messages" in body:
        body["messages"] = [
            {**{"role": "user", "content": "x"}, rng.choice(["role", "content", "tool_calls"]): value(rng)}
        ]
    data = json.dumps(body).encode()
    if rng.random() < 0.05:
        data = data[: rng.randrange(len(data))]
    return path, data


def fine(response: Response, data: bytes) -> None:
    assert response.status in (200, 400, 404, 413, 429), (response.status, data[:2000], response.body[:500])
    if response.status != 200:
        assert response.json["error"].keys() == {"message", "type", "param", "code"}
        assert len(response.json["error"]["message"]) < 1000


def hunt(running: Running, seed: int, count: int) -> None:
    rng = random.Random(seed)
    asked = [request(rng) for _ in range(count)]

    async def some(part: list[tuple[str, bytes]]) -> list[Response]:
        return await asyncio.gather(*(running.client.post(path, data) for path, data in part))

    for begin in range(0, count, 20):
        part = asked[begin : begin + 20]
        for (_, data), response in zip(part, running.do(some(part))):
            fine(response, data)


def test_hostile_requests_at_random(running: Running) -> None:
    pid = running.engine.pid
    hunt(running, 0, COUNT)
    idle(running)
    assert running.engine.pid == pid
    assert running.service.active == 0
