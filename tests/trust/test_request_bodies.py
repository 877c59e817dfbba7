"""One body does not stop a server: whatever is in it, others are answered meanwhile, and it takes
little memory.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from modelmill.serve import warmup
from modelmill.serve.app import REQUEST_MODELS
from tests.hypothesis_examples import examples
from tests.serve.segment_service import SegmentService
from tests.trust.request_cost import (
    MAX_BLOCKED_SECONDS,
    MAX_MEMORY_FACTOR,
    MEMORY_SLACK_BYTES,
    measure_request,
)
from tests.trust.test_serving import COMPLETION, idle
from tools.soak import large_requests

MB = 1 << 20
ISSUE: list[tuple[str, str, str, int]] = [
    ("/detokenize", "tokens", "texts", 4),
    ("/detokenize", "tokens", "ids", 4),
    ("/v1/completions", "prompt", "lists of texts", 4),
    ("/v1/completions", "prompt", "ids in lists", 4),
    ("/v1/completions", "logit_bias", "ids as keys", 4),
    ("/v1/chat/completions", "messages", "empty objects", 16),
    ("/v1/chat/completions", "messages", "messages", 16),
    ("/v1/chat/completions", "metadata", "keys", 16),
    ("/v1/responses", "input", "a text of escapes", 16),
    ("/v1/segment", "points", "points", 16),
    ("/v1/segment", "image", "base64", 16),
    ("/v1/segment", "image", "a text", 16),
    ("/v1/embeddings", "input", "ids and a text", 4),
    ("/tokenize", "prompt", "a text of digits", 4),
]


@pytest.fixture(scope="module")
def running(running_with_sam: SegmentService) -> Iterator[SegmentService]:
    service = running_with_sam
    measure_request(
        service,
        "/tokenize",
        large_requests.body("/tokenize", "prompt", large_requests.VALUES["ids"](MB), "stories"),
    )  # imports
    # as a server does before it is ready: this process has many more objects than one
    warmup.freeze_gc()
    yield service
    gc.unfreeze()


def check(running: SegmentService, path: str, data: bytes) -> None:
    cost = measure_request(running, path, data)
    assert cost.response.status in (200, 400, 404, 413), cost.response.body[:300]
    assert cost.blocked_seconds <= MAX_BLOCKED_SECONDS, (path, data[:80], cost.blocked_seconds)
    assert cost.memory_growth <= MAX_MEMORY_FACTOR * len(data) + MEMORY_SLACK_BYTES, (
        path,
        data[:80],
        cost.memory_growth / len(data),
    )
    assert len(cost.response.body) < 1000 or cost.response.status == 200


@pytest.mark.parametrize(("path", "field", "what", "size"), ISSUE, ids=lambda value: str(value))
def test_a_large_body_delays_no_other_request(
    running: SegmentService, path: str, field: str, what: str, size: int
) -> None:
    model = "sam" if path == "/v1/segment" else "stories"
    check(
        running,
        path,
        large_requests.body(path, field, large_requests.VALUES[what](size * MB - 400), model),
    )


@pytest.mark.parametrize("path", large_requests.FIELDS)
def test_large_bodies_at_random(running: SegmentService, path: str) -> None:
    rng, model = random.Random(path), "sam" if path == "/v1/segment" else "stories"
    check(running, path, large_requests.unknown_keys(MB, model))
    for _ in range(examples(full=6, quick=2)):
        value = large_requests.VALUES[rng.choice(list(large_requests.VALUES))](
            rng.choice((MB // 8, MB))
        )
        check(
            running,
            path,
            large_requests.body(path, rng.choice(list(large_requests.FIELDS[path])), value, model),
        )
    idle(running)


@pytest.mark.parametrize(("tokens", "top"), [(4000, 20), (16_000, 4)])
def test_an_answer_with_its_log_probabilities_comes_back(
    running: SegmentService, tokens: int, top: int
) -> None:
    """As a client sends it that keeps the items of a response."""
    rng = random.Random(0)
    drawn = [
        {"token": " the", "logprob": -rng.random(), "bytes": [*b" the"]}
        for _ in range(tokens + top)
    ]
    logprobs = [{**drawn[i], "top_logprobs": drawn[i : i + top]} for i in range(tokens)]
    part = {"type": "output_text", "text": "the", "annotations": [], "logprobs": logprobs}
    message = {"type": "message", "role": "assistant", "content": [part]}
    body = {
        "model": "stories",
        "input": [message, {"role": "user", "content": "x"}],
        "max_output_tokens": 16,
    }
    data = json.dumps(body, separators=(",", ":")).encode()
    check(running, "/v1/responses", data)
    assert running.run(running.client.post("/v1/responses", data)).status == 200


def test_every_path_that_takes_a_body_is_there() -> None:
    assert set(large_requests.FIELDS) == set(REQUEST_MODELS)


def test_paths_without_pictures_take_less(running: SegmentService) -> None:
    client = running.limited_client(max_body_bytes=4096, max_text_body_bytes=2048)
    sizes = {path: 4096 if path in TAKES_PICTURES else 2048 for path in REQUEST_MODELS}
    for path, most in sizes.items():
        flag = "--max-body-bytes" if path in TAKES_PICTURES else "--max-text-body-bytes"
        message = f"the request is larger than {most} bytes, the most that this path takes ({flag})"
        for headers in ({}, {"content-length": "10"}):
            over = running.run(client.post(path, b" " * (most + 1), headers=headers))
            assert (over.status, over.error_message) == (413, message)
        assert running.run(client.post(path, b" " * most)).status == 400


TAKES_PICTURES = (
    "/v1/chat/completions",
    "/v1/chat/completions/input_tokens",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses/compact",
    "/v1/responses/input_tokens",
    "/v1/segment",
    "/api/chat",
    "/api/generate",
    "/tokenize",
)


WITHOUT_LISTS = (
    "/api/show",
    "/v1/models/load",
    "/v1/models/unload",
    "/v1/models/pin",
    "/v1/models/reload",
    "/v1/sessions/restore",
)


def schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every part of a validator's description."""
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from schemas(value)
    elif isinstance(schema, (list, tuple)):
        for value in schema:
            yield from schemas(value)


@pytest.mark.parametrize("path", REQUEST_MODELS)
def test_lists_end_at_their_first_error_and_objects_are_counted_first(path: str) -> None:
    """An error for each element is what made a megabyte take minutes."""
    core_schema = REQUEST_MODELS[path].__pydantic_core_schema__
    lists = [each for each in schemas(core_schema) if each.get("type") == "list"]
    assert lists or path in WITHOUT_LISTS
    assert all(each.get("fail_fast") for each in lists), lists
    before = [
        each["schema"] for each in schemas(core_schema) if each.get("type") == "function-before"
    ]
    objects = [each for each in schemas(core_schema) if each.get("type") == "dict"]
    assert all(any(each is inner for part in before for inner in schemas(part)) for each in objects)
    models = [each for each in schemas(core_schema) if each.get("type") == "model"]
    assert all(each["schema"]["type"] == "function-before" for each in models)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    "metadata",
    [
        {str(i): "x" for i in range(17)},
        {"a": "x" * 513},
        {"a" * 65: "x"},
        {"a": 1},
        {"a": {"b": "c"}},
    ],
)
def test_metadata_are_few(running: SegmentService, path: str, metadata: Any) -> None:
    body = {
        "/v1/completions": {"prompt": "x", "max_tokens": 1},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
        },
        "/v1/responses": {"input": "x", "max_output_tokens": 16},
    }[path]  # fmt: skip
    error = running.post(path, {"model": "stories", **body, "metadata": metadata})
    assert (error.status, error.json["error"]["param"]) == (400, "metadata")
    fine = {str(i): "x" * 512 for i in range(16)}
    assert running.post(path, {"model": "stories", **body, "metadata": fine}).status == 200


def test_what_is_returned_about_tokens_is_bounded(running: SegmentService) -> None:
    def post(path: str, **body: Any) -> Any:
        return running.post(path, {"model": "stories", **body})

    assert post("/detokenize", tokens=[403] * 16384).status == 200
    error = post("/detokenize", tokens=[403] * 16385).json["error"]
    assert error["message"] == "tokens has 16385 ids; the limit is 16384; send them in parts"
    assert post("/tokenize", prompt="a b " * 1000).json["count"] > 512
    assert running.post("/v1/completions", COMPLETION).status == 200


def test_bodies_of_clients_that_leave_delay_no_other_client(running: SegmentService) -> None:
    """Those whose turn has not come are not read at all, and large ones never stand before smaller
    ones.
    """
    service, client = running.service, running.client
    turn, read = threading.Event(), list[int]()

    def work(data: bytearray) -> None:
        read.append(len(data))
        turn.wait(60)

    async def main() -> None:
        first = asyncio.create_task(service.parse_in_thread(work, bytearray(2 * MB)))
        ask = large_requests.body(
            "/v1/segment", "image", large_requests.VALUES["base64"](4 * MB), "sam"
        )
        left = []
        for _ in range(8):
            parts = client.parts("POST", "/v1/segment", ask)
            left.append((parts, asyncio.create_task(anext(parts))))
        while sum(service._parsing_bytes.values()) < 18 * MB:
            await asyncio.sleep(0)
        small = b'{"model":"stories","prompt":"x","max_tokens":1' + b" " * 20_000 + b"}"
        assert (await client.post("/v1/completions", small)).status == 200
        for parts, task in left:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await parts.aclose()
        while sum(service._parsing_bytes.values()) > 2 * MB + 400:
            await asyncio.sleep(0)
        turn.set()
        await first

    try:
        running.run(asyncio.wait_for(main(), 60))
    finally:
        turn.set()
    assert read == [2 * MB]
    idle(running)
