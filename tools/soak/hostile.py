"""Requests made of hostile parts at random: that would be fine, with fields changed, added or cut."""

from __future__ import annotations

import json
import random
from typing import Any

from modelmill.serve.responses import ResponsesRequest
from modelmill.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from modelmill.serve.segment_schema import SegmentRequest
from tools.soak import pictures

KINDS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    pictures.PATH: SegmentRequest,
}
PATHS = [path for path in KINDS if path != pictures.PATH]
STATUSES = (200, 400, 404, 413, 429)
PLAIN: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 0.0, -0.0, 0.5, 1.5, 2**31, 2**63, -(2**70), 1e308, "", "a", "\u0000",
    "\ud800", "é" * 9, "<s></s>", "x" * 3000, "{{ 7 * 7 }}", "../../etc/passwd", [], {}, "MODEL", "auto",
    "required", "text", "json_object", "json_schema", "function", "user", "assistant", "system", "tool", "Once",
]  # fmt: skip
KEYS = ["type", "role", "content", "name", "function", "json_schema", "schema", "regex", "choice", "json", "1", "403"]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON, mostly small, often wrong."""
    if depth > 3 or rng.random() < 0.6:
        return rng.choice(PLAIN)
    if rng.random() < 0.5:
        return [value(rng, depth + 1) for _ in range(rng.choice((1, 2, 3, 40)))]
    return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.choice((1, 2, 3)))}


def request(rng: random.Random, model: str = "stories", viewer: str | None = None) -> tuple[str, bytes]:
    """(path, body). viewer: an engine that segments; such requests are made only where there is one."""
    path = rng.choice(PATHS if viewer is None else list(KINDS))
    body: dict[str, Any] = {"model": model, "max_tokens": 3}
    if path == "/v1/completions":
        body["prompt"] = "Once upon a time"
    elif path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "hello"}]
    elif path == "/v1/responses":
        body = {"model": model, "input": "hello", "max_output_tokens": 3}
    elif path == pictures.PATH:
        body = {"model": viewer, **pictures.hostile(rng)}
    else:
        body = {"tokens": [1, 403]} if path == "/detokenize" else {"prompt": "hello"}
    fields = list(KINDS[path].model_fields)
    for _ in range(rng.choice((0, 0, 1)) if path == pictures.PATH else rng.choice((1, 1, 2, 3))):
        body[rng.choice(fields)] = value(rng)
    if rng.random() < 0.3 and "messages" in body:
        message = {"role": "user", "content": "x", rng.choice(["role", "content", "tool_calls"]): value(rng)}
        body["messages"] = [message]
    data = json.dumps(body).encode()
    if rng.random() < 0.05:
        data = data[: rng.randrange(len(data))]
    return path, data


def wrong(status: int, body: bytes) -> str | None:
    """Why an answer is none that such a request may get; None where it is."""
    if status not in STATUSES:
        return f"status {status}"
    if status == 200:
        return None
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {status} without an error of OpenAI's form"
    if error.keys() != {"message", "type", "param", "code"}:
        return f"an error with {sorted(error)}"
    return "a message without end" if len(error["message"]) >= 1000 else None
