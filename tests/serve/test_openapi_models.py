"""Answers are what the OpenAPI document says, and the document holds together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.serve.app import REQUEST_MODELS
from modelmill.serve.openapi_models import RESPONSE_MODELS, SSE_STREAM_PATHS
from tests.serve.service_thread import ServiceThread
from tests.serve.tool_schemas import tool_without_arguments

pytestmark = pytest.mark.usefixtures("brief_tools")

TALK = [{"role": "user", "content": "x"}]
TOOL = tool_without_arguments("f")
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "Once upon"}),
    ("/tokenize", {"messages": TALK, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/completion", {"prompt": "Once", "n_predict": 3, "n_probs": 2}),
    ("/completion", {"prompt": ["Once", [5, "Then"]], "n_predict": 3}),
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 3}),
    (
        "/v1/chat/completions",
        {
            "messages": TALK,
            "max_tokens": 3,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": TALK,
            "max_tokens": 120,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
        },
    ),
    ("/v1/completions", {"prompt": ["Once", "Then"], "max_tokens": 3}),
    (
        "/v1/completions",
        {"prompt": "Once", "max_tokens": 3, "echo": True, "logprobs": 2, "return_token_ids": True},
    ),
    ("/v1/embeddings", {"input": ["Once", "Then"]}),
    ("/v1/embeddings", {"input": [5, 6], "encoding_format": "base64"}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 3}),
    ("/v1/responses/input_tokens", {"input": "x"}),
    ("/v1/responses/compact", {"input": "x", "max_output_tokens": 3}),
    (
        "/v1/responses",
        {
            "input": TALK,
            "max_output_tokens": 3,
            "instructions": "Be kind",
            "top_logprobs": 2,
            "user": "u",
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/responses",
        {
            "input": "x",
            "max_output_tokens": 120,
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "required",
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: str(value)[:60])
def test_answers_fit(running: ServiceThread, path: str, body: dict[str, Any]) -> None:
    response = running.post(
        path, {"model": "stories", "temperature": 0, **body} if "/v1/c" in path else body | NAMED
    )
    assert response.status == 200, response.body
    RESPONSE_MODELS[path].model_validate_json(response.body, strict=True)


NAMED = {"model": "stories"}


@pytest.mark.parametrize(
    "path", ["/health", "/version", "/v1/models", "/v1/models/{name}", "/api/tags", "/api/version"]
)
def test_what_is_asked_without_a_body_fits(running: ServiceThread, path: str) -> None:
    response = running.get(path.format(name="stories"))
    assert response.status == 200
    RESPONSE_MODELS[path].model_validate_json(response.body, strict=True)


def test_every_path_says_what_it_answers_and_every_reference_is_there(
    running: ServiceThread,
) -> None:
    document = running.get("/openapi.json").json
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            content = operation["responses"]["200"]["content"]
            assert ("text/event-stream" in content) == (path in SSE_STREAM_PATHS)
            assert all(each["schema"] for each in content.values()), path
        if any("requestBody" in operation for operation in operations.values()):
            assert path in (*RESPONSE_MODELS, "/v1/segment")  # its route says it itself
            assert path in REQUEST_MODELS, "its errors name no field, its body has no own limit"
    missing = [name for name in _references(document) if name not in schemas]
    assert not missing


def test_names_that_are_taken_are_kept_apart() -> None:
    from modelmill.serve.openapi_models import add_response_schemas

    schemas = {"Usage": {"type": "string"}}
    answer = {
        "responses": {
            "200": {"content": {}},
            "503": {"content": {"application/json": {"schema": {}}}},
        }
    }
    document: dict[str, Any] = {
        "components": {"schemas": schemas},
        "paths": {path: {"post": json.loads(json.dumps(answer))} for path in RESPONSE_MODELS},
    }
    add_response_schemas(document)
    assert schemas["Usage"] == {"type": "string"}
    usage = schemas["CompletionResponse"]["properties"]["usage"]  # type: ignore[index]
    assert usage == {"$ref": "#/components/schemas/AnswerUsage"}
    assert "AnswerUsage" in schemas


def _references(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_references, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    refs = set().union(*map(_references, value.values())) if value else set()
    if isinstance(value.get("$ref"), str):
        refs.add(value["$ref"].rpartition("/")[2])
    return refs
