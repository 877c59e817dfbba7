"""Schemathesis hooks: valid requests name the served model and request few tokens.

Left alone, every generated model is one that does not exist and every conversation is nonsense, and
no case would reach the engine. Only a value that is valid already becomes another valid one, so
what was made wrong on purpose stays wrong.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import schemathesis

MAX_TOKENS = 2
LENGTHS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/completion": ("n_predict",),
    "/infill": ("n_predict",),
}
"""Paths → their limits of the output; of llama.cpp's -1 means none."""
OLLAMA_PATHS = ("/api/chat", "/api/generate")


TALK = [{"role": "user", "content": "Name a fruit."}]
DEFAULT_FIELDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": "A fruit is"},
    "/v1/embeddings": {"input": ["a fruit", "a stone"]},
    "/v1/responses": {"input": TALK},
    "/tokenize": {"prompt": "A fruit"},
}
EXCLUSIVE_FIELDS = (
    "background", "best_of", "conversation", "dimensions", "grammar", "include", "logit_bias",
    "logprobs",
    "modalities", "previous_response_id", "response_format", "stop_token_ids", "stream_options",
    "structured_outputs", "suffix", "text", "tool_choice", "tools", "top_logprobs", "truncation",
    "min_tokens",
)  # fmt: skip
"""Fields that are refused beside others, or by value."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:  # noqa: ARG001  the hook's signature
    """Changes the body in place.

    Of those that fit the schema every other one is made a plain request.
    """
    body = case.body
    if not isinstance(body, dict):
        return
    path = case.operation.path
    expected = case.meta is not None and case.meta.generation.mode.value == "positive"
    if expected and path in DEFAULT_FIELDS and zlib.crc32(case.id.encode()) % 2:
        drop_exclusive_fields(body, path)
    set_model_and_limits(body, path, os.environ["CONFORMANCE_MODEL"])


def drop_exclusive_fields(body: dict[str, Any], path: str) -> None:
    """Without what excludes other fields; of a text that makes sense."""
    for name in (*EXCLUSIVE_FIELDS, "messages", "prompt"):
        body.pop(name, None)
    body.update(DEFAULT_FIELDS[path])


def set_model_and_limits(body: dict[str, Any], path: str, model: str) -> None:
    """The served model, few tokens, few answers."""
    if isinstance(body.get("model"), str) and len(body["model"]) <= 1024:
        body["model"] = model
    names = LENGTHS.get(path, ())
    for name in names:
        if type(body.get(name)) is not int:
            continue
        is_unlimited = name == "n_predict" and body[name] == -1
        if is_unlimited or MAX_TOKENS < body[name] < 2**31:
            body[name] = MAX_TOKENS
    if path in OLLAMA_PATHS and isinstance(body.get("options", {}), dict):
        options = body.setdefault("options", {})
        limit = options.get("num_predict", -1)
        if type(limit) is int and limit in (-1, -2):
            options["num_predict"] = MAX_TOKENS
    if names and all(body.get(name) is None for name in names):
        body[names[0]] = MAX_TOKENS
    for name in ("n", "best_of"):
        if type(body.get(name)) is int and MAX_TOKENS < body[name] <= 128:
            body[name] = MAX_TOKENS
