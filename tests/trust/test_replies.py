"""One reply does not block a server: others are answered meanwhile, however large it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.config import BuildConfig
from modelmill.llm import build_engine
from tests.serve.service_thread import ServiceThread
from tests.trust.request_cost import MAX_BLOCKED_SECONDS, measure_request
from tests.trust.test_serving import idle

LONGEST = 4096
IDS = [3 + 7 * i % 500 for i in range(LONGEST - 8)]
SCORED = {"prompt": IDS, "echo": True, "logprobs": 20, "max_tokens": 1, "temperature": 0}
DRAWN = {"min_tokens": 1500, "temperature": 1, "seed": 0}
CHAT = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 1500,
    "logprobs": True,
    "top_logprobs": 20,
}
REPLIES: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", SCORED, 1 << 20),
    ("/v1/completions", {**SCORED, "stream": True}, 1 << 20),
    ("/v1/completions", {**SCORED, "prompt": [IDS[:256]] * 40}, 4 << 20),
    ("/v1/chat/completions", {**CHAT, **DRAWN}, 1 << 20),
    ("/v1/chat/completions", {**CHAT, **DRAWN, "stream": True}, 1 << 20),
    (
        "/v1/responses",
        {"input": "x", "max_output_tokens": 1500, "top_logprobs": 20, **DRAWN},
        1 << 20,
    ),
    (
        "/v1/responses",
        {"input": "x", "max_output_tokens": 1500, "top_logprobs": 20, "stream": True, **DRAWN},
        4 << 20,
    ),
    ("/tokenize", {"prompt": "a b " * 2000, "return_token_strs": True}, 1 << 14),
    ("/detokenize", {"tokens": [403] * LONGEST}, 1 << 14),
]


@pytest.fixture(scope="module")
def running(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceThread]:
    """The trained LLaMA of 260 thousand parameters with a long context: what it says there is not
    looked at.
    """
    folder = tmp_path_factory.mktemp("long")
    for file in (shared / "data/models/stories260K").iterdir():
        shutil.copyfile(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONGEST}))
    build_engine(
        folder, folder / "long.engine", BuildConfig(dtype="float32", target="cpu"), check=False
    )
    service = ServiceThread(folder / "long.engine", kv_cache_bytes=64 << 20)
    service.post("/v1/completions", {"model": "stories", "prompt": "x", "max_tokens": 1})  # imports
    yield service
    service.close()


@pytest.mark.parametrize(("path", "body", "least"), REPLIES, ids=lambda value: str(value)[:20])
def test_a_large_reply_delays_no_other_request(
    running: ServiceThread, path: str, body: dict[str, Any], least: int
) -> None:
    cost = measure_request(
        running, path, json.dumps({"model": "stories", **body}).encode(), growth=None
    )
    assert (cost.response.status, len(cost.response.body) > least) == (200, True), len(
        cost.response.body
    )
    assert cost.blocked_seconds <= MAX_BLOCKED_SECONDS
    idle(running)


def test_a_large_reply_is_whole(running: ServiceThread) -> None:
    logprobs = running.post("/v1/completions", {"model": "stories", **SCORED}).json["choices"][0][
        "logprobs"
    ]
    events = running.post("/v1/completions", {"model": "stories", **SCORED, "stream": True}).events
    tables = [
        each["choices"][0]["logprobs"] for each in events[:-1] if each["choices"][0]["logprobs"]
    ]
    assert {key: [one for table in tables for one in table[key]] for key in logprobs} == logprobs
    assert [len(logprobs[key]) for key in sorted(logprobs)] == [len(IDS) + 1] * 4
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(len(best) in (20, 21) for best in logprobs["top_logprobs"][1:])


def test_the_log_probabilities_of_one_reply_are_bounded(running: ServiceThread) -> None:
    body = {"model": "stories", **SCORED, "prompt": [IDS] * 32}
    error = running.post("/v1/completions", body).json["error"]
    message = (
        "prompt needs more than 2097152 log-probabilities in one response; send it in parts, or "
        "request fewer logprobs"
    )
    assert error["message"] == message
    assert (
        running.post("/v1/completions", {**body, "prompt": IDS, "n": 32}).json["error"]["message"]
        == message
    )
    idle(running)
