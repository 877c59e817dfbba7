"""/invocations answers as the route does whose field the body has."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.dialect_calls import MODEL
from tests.serve.service_thread import ServiceThread

HI = [{"role": "user", "content": "Hi"}]
ANSWERED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 3, "temperature": 0}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 3, "temperature": 0}),
    ("/v1/completions", {"prompt": "a b " * 6000, "max_tokens": 0, "truncate_prompt_tokens": 5}),
    ("/v1/embeddings", {"input": "Lily"}),
    ("/v1/rerank", {"query": "Lily", "documents": ["Tom", "Lily"]}),
    ("/v1/rerank", {"query": "Lily", "texts": ["Tom", "Lily"]}),
    ("/v1/score", {"text_1": "Lily", "text_2": "Tom"}),
    ("/v1/score", {"queries": "Lily", "documents": ["Tom"]}),
    ("/v1/score", {"query": None, "queries": "Lily", "documents": ["Tom"]}),
]
CHANGING = {"id", "created", "timings", "usage"}


@pytest.mark.parametrize(("path", "body"), ANSWERED)
@pytest.mark.parametrize("model", [{}, {"model": MODEL}])
def test_the_answer_is_that_of_the_route(
    running: ServiceThread, path: str, body: dict[str, Any], model: dict[str, str]
) -> None:
    answer = running.post("/invocations", {**body, **model})
    assert answer.status == 200, answer.body
    same = running.post(path, {**body, "model": MODEL})
    if isinstance(same.json, list):
        assert answer.json == same.json
        return
    assert answer.json.keys() == same.json.keys()
    for name in answer.json.keys() - CHANGING:
        assert answer.json[name] == same.json[name]


def test_streams(running: ServiceThread) -> None:
    body = {"messages": HI, "max_tokens": 3, "temperature": 0, "stream": True}
    assert running.post("/invocations", body).body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "the request's body has none of these fields: messages, prompt, input", None),
        ({"odd": 1}, "the request's body has none of these fields: messages", None),
        ({"prompt": None}, "the request's body has none of these fields: messages", None),
        ({"prompt": "x", "odd": 1}, "odd: unknown field", "odd"),
        ({"messages": []}, "messages: must have at least 1 items", "messages"),
        ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least",
         "truncate_prompt_tokens"),
        ({"prompt": [999999]}, "the prompt's token ids must be between", "prompt"),
        ({"input": ""}, "input is empty", "input"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_of_the_route(
    running: ServiceThread, body: dict[str, Any], message: str, param: str | None
) -> None:
    response = running.post("/invocations", body)
    assert response.status == 400, response.body
    error = response.json["error"]
    assert error["message"].startswith(message)
    assert error["param"] == param


def test_other_methods_and_models(running: ServiceThread) -> None:
    assert running.get("/invocations").status == 405
    body = {"model": "nobody", "prompt": "x"}
    assert running.post("/invocations", body).json["error"]["code"] == "model_not_found"
