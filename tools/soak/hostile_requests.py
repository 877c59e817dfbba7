"""Random hostile requests: valid ones with fields changed, added or cut."""

from __future__ import annotations

import json
import random
from typing import Any

from pydantic import BaseModel

from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.responses_schema import ResponsesRequest
from modelmill.serve.segmentation_schema import SegmentRequest
from modelmill.serve.tokenize_schema import DetokenizeRequest, TokenizeRequest
from tools.soak import segment_requests

REQUEST_TYPES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    segment_requests.PATH: SegmentRequest,
}
PATHS = [path for path in REQUEST_TYPES if path != segment_requests.PATH]
STATUSES = (200, 400, 404, 413, 429)
PLAIN_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 0.0, -0.0, 0.5, 1.5, 2**31, 2**63, -(2**70), 1e308, "",
    "a", "\u0000",
    "\ud800", "é" * 9, "<s></s>", "x" * 3000, "{{ 7 * 7 }}", "../../etc/passwd", [], {}, "MODEL",
    "auto",
    "required", "text", "json_object", "json_schema", "function", "user", "assistant", "system",
    "tool", "Once",
]  # fmt: skip
KEYS = [
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


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, mostly small, often invalid."""
    if depth > 3 or rng.random() < 0.6:
        return rng.choice(PLAIN_VALUES)
    if rng.random() < 0.5:
        return [random_value(rng, depth + 1) for _ in range(rng.choice((1, 2, 3, 40)))]
    return {rng.choice(KEYS): random_value(rng, depth + 1) for _ in range(rng.choice((1, 2, 3)))}


def random_request(
    rng: random.Random, model: str = "stories", segment_model: str | None = None
) -> tuple[str, bytes]:
    """Make a request; return (path, body).

    segment_model: an engine that segments; None: no segmentation requests.
    """
    path = rng.choice(PATHS if segment_model is None else list(REQUEST_TYPES))
    body: dict[str, Any] = {"model": model, "max_tokens": 3}
    if path == "/v1/completions":
        body["prompt"] = "Once upon a time"
    elif path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "hello"}]
    elif path == "/v1/responses":
        body = {"model": model, "input": "hello", "max_output_tokens": 3}
    elif path == segment_requests.PATH:
        body = {"model": segment_model, **segment_requests.hostile_request(rng)}
    else:
        body = {"tokens": [1, 403]} if path == "/detokenize" else {"prompt": "hello"}
    fields = list(REQUEST_TYPES[path].model_fields)
    for _ in range(
        rng.choice((0, 0, 1)) if path == segment_requests.PATH else rng.choice((1, 1, 2, 3))
    ):
        body[rng.choice(fields)] = random_value(rng)
    if rng.random() < 0.3 and "messages" in body:
        message = {
            "role": "user",
            "content": "x",
            rng.choice(["role", "content", "tool_calls"]): random_value(rng),
        }
        body["messages"] = [message]
    data = json.dumps(body).encode()
    if rng.random() < 0.05:
        data = data[: rng.randrange(len(data))]
    return path, data


def response_problem(status: int, body: bytes) -> str | None:
    """Why a response is not allowed for such a request; None if it is allowed."""
    if status not in STATUSES:
        return f"status {status}"
    if status == 200:
        return None
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {status} without an error in OpenAI's format"
    if error.keys() != {"message", "type", "param", "code"}:
        return f"an error with {sorted(error)}"
    return "a message that is too long" if len(error["message"]) >= 1000 else None
