"""Errors as each dialect writes them; the counts of a long prompt are fields, not words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.core.errors import PromptTokenCounts, PromptTooLong, RequestError
from modelmill.serve.dialects.error_format import anthropic_error
from modelmill.serve.dialects.llama_cpp_answer import LlamaCppAnswerBuilder
from modelmill.serve.errors import CONTEXT_LENGTH_EXCEEDED, to_api_error
from tests.serve.service_thread import ServiceThread


def anthropic_message(error: RequestError) -> str:
    return str(anthropic_error(to_api_error(error))["error"]["message"])


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (PromptTokenCounts(700, 511), "prompt is too long: 700 tokens > 511 maximum"),
        (
            PromptTokenCounts(700, 511, counts_all=False),
            "prompt is too long: more than 700 tokens > 511 maximum",
        ),
        (None, "prompt is too long: any words"),
    ],
)
def test_the_numbers_are_told_whatever_the_words(
    counts: PromptTokenCounts | None, message: str
) -> None:
    error = PromptTooLong("any words", counts)
    assert to_api_error(error).code == CONTEXT_LENGTH_EXCEEDED
    assert anthropic_message(error) == message
    assert anthropic_message(error.reworded("other words")).replace("other", "any") == message


def test_words_alone_make_no_long_prompt() -> None:
    error = RequestError("the prompt has 700 tokens, this engine takes 511; shorten it")
    assert to_api_error(error).code is None
    assert anthropic_message(error) == str(error)


@pytest.mark.parametrize(
    ("path", "body", "status", "error_type"),
    [
        ("/completion", {"prompt": 5}, 400, "invalid_request_error"),
        ("/completion", {"prompt": "a", "model": "nobody"}, 404, "not_found_error"),
        ("/infill", {"input_prefix": "a"}, 400, "invalid_request_error"),
        ("/tokenize", {"content": 5}, 400, "invalid_request_error"),
        ("/detokenize", {"tokens": "a"}, 400, "invalid_request_error"),
        ("/apply-template", {}, 400, "invalid_request_error"),
        ("/props", {}, 405, "invalid_request_error"),
    ],
)
def test_llama_cpps_paths_answer_its_form(
    running: ServiceThread, path: str, body: dict[str, Any], status: int, error_type: str
) -> None:
    """As ``format_error_response`` of llama.cpp's server writes it, and the field."""
    answer = running.post(path, {"model": "stories", **body})
    error = answer.json["error"]
    assert (answer.status, error["code"], error["type"]) == (status, status, error_type)
    assert error.keys() == {"code", "message", "type", "param"}


def test_a_long_prompt_on_llama_cpps_paths(running: ServiceThread) -> None:
    answer = running.post("/completion", {"model": "stories", "prompt": [5] * 600})
    error = answer.json["error"]
    assert (error["code"], error["type"]) == (400, "exceed_context_size_error")
    assert (error["n_prompt_tokens"], error["n_ctx"], error["param"]) == (600, 512, "prompt")


def test_a_missing_key_on_llama_cpps_paths(running: ServiceThread) -> None:
    client = running.limited_client(api_keys=("secret",))
    error = running.run(client.get("/props")).json["error"]
    assert (error["code"], error["type"]) == (401, "authentication_error")


def test_the_error_that_ends_a_stream_of_llama_cpp() -> None:
    """``EventStream`` asks the answer's builder, not the path."""
    error = to_api_error(RequestError("prompt has no tokens"), frozenset(("prompt",)))
    data = LlamaCppAnswerBuilder.error_events(None, error)  # type: ignore[arg-type]
    assert json.loads(data.removeprefix(b"data: ")) == {
        "error": {
            "code": 400,
            "message": "prompt has no tokens",
            "type": "invalid_request_error",
            "param": "prompt",
        }
    }
