"""One body does not stop a server: whatever is in it, others are answered meanwhile, and it takes little memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelmill.serve.app import BODIES, make_app
from modelmill.serve.service import Limits, Service
from tests.serve.asgi import Client
from tests.serve.conftest import sam, stories  # noqa: F401  the engines that tests of the server share
from tests.serve.seeing import Seeing
from tests.trust.test_serving import COMPLETION, idle
from tests.trust.watch import GROWTH, HELD, SLACK, watched
from tools.soak import large

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
def running(stories: Path, sam: Path) -> Iterator[Seeing]:  # noqa: F811
    service = Seeing(stories, sam)
    watched(service, "/tokenize", large.body("/tokenize", "prompt", large.VALUES["ids"](MB), "stories"))  # imports
    yield service
    service.close()


def check(running: Seeing, path: str, data: bytes) -> None:
    seen = watched(running, path, data)
    assert seen.response.status in (200, 400, 404, 413), seen.response.body[:300]
    assert seen.held <= HELD, (path, data[:80], seen.held)
    assert seen.grown <= GROWTH * len(data) + SLACK, (path, data[:80], seen.grown / len(data))
    assert len(seen.response.body) < 1000 or seen.response.status == 200


@pytest.mark.parametrize(("path", "field", "what", "size"), ISSUE, ids=lambda value: str(value))
def test_a_large_body_holds_nobody_up(running: Seeing, path: str, field: str, what: str, size: int) -> None:
    model = "sam" if path == "/v1/segment" else "stories"
    check(running, path, large.body(path, field, large.VALUES[what](size * MB - 400), model))


@pytest.mark.parametrize("path", large.FIELDS)
def test_large_bodies_at_random(running: Seeing, path: str) -> None:
    rng, model = random.Random(path), "sam" if path == "/v1/segment" else "stories"
    check(running, path, large.unknown_keys(MB, model))
    for _ in range(6):
        value = large.VALUES[rng.choice(list(large.VALUES))](rng.choice((MB // 8, MB)))
        check(running, path, large.body(path, rng.choice(list(large.FIELDS[path])), value, model))
    idle(running)


def test_every_path_that_takes_a_body_is_there() -> None:
    assert set(large.FIELDS) == set(BODIES)


def test_paths_without_pictures_take_less(running: Seeing) -> None:
    client = Client(make_app(Service(running.service.engines, Limits(body=4096, text=2048))))
    sizes = {path: 4096 if path in TAKES_PICTURES else 2048 for path in BODIES}
    for path, most in sizes.items():
        flag = "--max-body-bytes" if path in TAKES_PICTURES else "--max-text-body-bytes"
        told = f"the request is larger than {most} bytes, the most that this path takes ({flag})"
        for headers in ({}, {"content-length": "10"}):
            over = running.do(client.post(path, b" " * (most + 1), headers=headers))
            assert (over.status, over.json["error"]["message"]) == (413, told)
        assert running.do(client.post(path, b" " * most)).status == 400


TAKES_PICTURES = ("/v1/chat/completions", "/v1/responses", "/v1/segment", "/tokenize")


def schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every part of a validator's description."""
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from schemas(value)
    elif isinstance(schema, (list, tuple)):
        for value in schema:
            yield from schemas(value)


@pytest.mark.parametrize("path", BODIES)
def test_lists_end_at_their_first_error_and_objects_are_counted_first(path: str) -> None:
    """An error for each element is what made a megabyte take minutes."""
    whole = BODIES[path].__pydantic_core_schema__
    lists = [each for each in schemas(whole) if each.get("type") == "list"]
    assert lists
    assert all(each.get("fail_fast") for each in lists), lists
    before = [each["schema"] for each in schemas(whole) if each.get("type") == "function-before"]
    objects = [each for each in schemas(whole) if each.get("type") == "dict"]
    assert all(any(each is inner for part in before for inner in schemas(part)) for each in objects)
    models = [each for each in schemas(whole) if each.get("type") == "model"]
    assert all(each["schema"]["type"] == "function-before" for each in models)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    "metadata", [{str(i): "x" for i in range(17)}, {"a": "x" * 513}, {"a" * 65: "x"}, {"a": 1}, {"a": {"b": "c"}}]
)
def test_metadata_are_few(running: Seeing, path: str, metadata: Any) -> None:
    talk = {"messages": [{"role": "user", "content": "x"}]}
    asked = {**({"prompt": "x"} if path == "/v1/completions" else talk if "chat" in path else {"input": "x"})}
    error = running.post(path, {"model": "stories", **asked, "metadata": metadata})
    assert (error.status, error.json["error"]["param"]) == (400, "metadata")
    fine = {str(i): "x" * 512 for i in range(16)}
    assert running.post(path, {"model": "stories", **asked, "metadata": fine}).status == 200


def test_what_is_told_of_tokens_is_bounded(running: Seeing) -> None:
    def post(path: str, **body: Any) -> Any:
        return running.post(path, {"model": "stories", **body})

    assert post("/detokenize", tokens=[403] * 16384).status == 200
    error = post("/detokenize", tokens=[403] * 16385).json["error"]
    assert error["message"] == "tokens holds 16385 ids, up to 16384 are taken; send them in parts"
    assert post("/tokenize", prompt="a b " * 1000).json["count"] > 512
    assert running.post("/v1/completions", COMPLETION).status == 200
