"""Values of fields as the API of each dialect takes them: top_p 0, no limit, an empty suffix, …"""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.serve.app import make_app
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.dialects.llama_cpp_schema import InfillRequest
from modelmill.serve.service import Service, ServiceLimits
from tests.serve.asgi_client import Client, Response
from tests.serve.dialect_calls import post
from tests.serve.service_thread import ServiceThread

PROMPT = "Once upon a time"
HI = [{"role": "user", "content": "Hi"}]
TEXTS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "/v1/chat/completions": (
        {"messages": HI, "max_tokens": 12},
        "",
        lambda answer: answer["choices"][0]["message"]["content"],
    ),
    "/v1/completions": (
        {"prompt": PROMPT, "max_tokens": 12},
        "",
        lambda answer: answer["choices"][0]["text"],
    ),
    "/v1/messages": (
        {"messages": HI, "max_tokens": 12},
        "",
        lambda answer: answer["content"][0]["text"],
    ),
    "/v1/responses": (
        {"input": "Hi", "max_output_tokens": 12},
        "",
        lambda answer: answer["output"][0]["content"][0]["text"],
    ),
    "/completion": ({"prompt": PROMPT, "n_predict": 12}, "", lambda answer: answer["content"]),
    "/api/chat": (
        {"messages": HI, "stream": False, "options": {"num_predict": 12}},
        "options",
        lambda answer: answer["message"]["content"],
    ),
    "/api/generate": (
        {"prompt": PROMPT, "raw": True, "stream": False, "options": {"num_predict": 12}},
        "options",
        lambda answer: answer["response"],
    ),
}
"""Body, where its sampling fields are, and how to read the answer's text, by path."""


def text_of(running: ServiceThread, path: str, **fields: Any) -> str:
    body, place, read = TEXTS[path]
    body = {**body, **fields} if not place else {**body, place: {**body[place], **fields}}
    text: str = read(post(running, path, body).json)
    return text


@pytest.mark.parametrize("path", TEXTS)
def test_top_p_0_is_greedy_in_every_api(running: ServiceThread, path: str) -> None:
    greedy = text_of(running, path, temperature=0)
    assert text_of(running, path, temperature=1, top_p=0) == greedy
    assert text_of(running, path, top_p=0) == greedy


@pytest.mark.parametrize("path", ["/completion", "/api/chat", "/api/generate"])
def test_temperatures_above_2_where_the_api_has_no_limit(running: ServiceThread, path: str) -> None:
    assert text_of(running, path, temperature=2.5, top_k=1) == text_of(running, path, temperature=0)
    warm = {text_of(running, path, temperature=heat, seed=1, top_k=40) for heat in (1, 2, 60)}
    assert len(warm) == 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_openais_limit_of_the_temperature(running: ServiceThread, path: str) -> None:
    body = {"model": "stories", **TEXTS[path][0], "temperature": 2.5}
    error = running.post(path, body).json["error"]
    assert error["message"].startswith("temperature: must be at most 2")


def test_a_limit_of_minus_1_is_none(running: ServiceThread) -> None:
    """As n_predict: -1; without it a completion has 16 tokens."""
    ask = {"prompt": PROMPT, "temperature": 0}
    unlimited = post(running, "/v1/completions", {**ask, "n_predict": -1}).json
    assert unlimited["usage"]["completion_tokens"] > 16
    answer = post(running, "/v1/completions", {**ask, "max_tokens": -1}).json
    assert answer["choices"] == unlimited["choices"]
    chat = {"messages": HI, "temperature": 0}
    choices = post(running, "/v1/chat/completions", chat).json["choices"]
    for name in ("max_tokens", "max_completion_tokens"):
        answer = post(running, "/v1/chat/completions", {**chat, name: -1}).json
        assert answer["choices"] == choices, name
        for wrong in (0, -2):
            body = {"model": "stories", **chat, name: wrong}
            error = running.post("/v1/chat/completions", body).json["error"]
            assert error["message"] == f"{name}: must be at least 1, or -1 for no limit"


def test_an_empty_suffix_is_none(running: ServiceThread) -> None:
    """Also of a model without tokens that mark what is filled in; /infill may have one."""
    ask = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    plain = post(running, "/v1/completions", ask).json["choices"]
    assert post(running, "/v1/completions", {**ask, "suffix": ""}).json["choices"] == plain
    echoed = post(running, "/v1/completions", {**ask, "echo": True}).json["choices"]
    answer = post(running, "/v1/completions", {**ask, "echo": True, "suffix": ""}).json
    assert answer["choices"] == echoed
    fills_in = InfillRequest.model_validate({"input_prefix": "a", "input_suffix": ""})
    assert fills_in.to_completion_request().infill_suffix == ""
    assert CompletionRequest.model_validate({**ask, "suffix": ""}).infill_suffix is None


WITHOUT_MODEL: dict[str, dict[str, Any] | None] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 1},
    "/completion": {"prompt": "a", "n_predict": 1},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": HI},
    "/props": None,
}


@pytest.mark.parametrize("path", WITHOUT_MODEL)
def test_of_several_models_a_request_names_one(running: ServiceThread, path: str) -> None:
    """In silence, the first would answer."""
    body = WITHOUT_MODEL[path]
    other = type("Other", (), {"name": "other", "engine_type": "language"})()
    names = {"stories": running.engine, "again": running.engine}
    service = Service(names, ServiceLimits(), running.service.metrics)
    service.engines = {**service.engines, "other": other}
    client = Client(make_app(service))

    def ask(**model: str) -> Response:
        if body is None:
            query = "".join(f"?model={name}" for name in model.values())
            return running.run(client.get(path + query))
        return running.run(client.post(path, {**model, **body}))

    error = ask().json["error"]
    assert error["param"] == "model"
    assert error["message"] == "model: field required; there are stories, other"
    named = ask(model="again")
    assert named.status == 200 or "no tokens" in named.body.decode(), named.body
