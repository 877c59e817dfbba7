"""A schema holds after thinking, in every dialect: random schemas, answers at random."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.dialects.thinking import with_thinking
from modelmill.serve.routes import ollama as ollama_route
from modelmill.text_processor import TextProcessor
from tests.serve.dialect_calls import post
from tests.serve.service_thread import ServiceThread
from tests.text.random_schemas import is_valid

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n<think>\n{% endif %}"
)
THINKING_TOKENS, MAX_TOKENS = 6, 420


@pytest.fixture(scope="module")
def service(running: ServiceThread) -> Iterator[ServiceThread]:
    with running.other_template(TEMPLATE) as service:
        yield service


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are short, so that an answer ends before its limit."""
    value_types = ["integer", "boolean", "null", "enum"] + ["object", "array"] * (depth > 0)
    value_type = "object" if depth == 2 else rng.choice(value_types)
    if value_type == "object":
        keys = rng.sample(["a", "b", "c"], rng.randint(1, 2))
        properties = {key: random_schema(rng, depth - 1) for key in keys}
        return {
            "type": "object",
            "properties": properties,
            "required": keys,
            "additionalProperties": False,
        }
    if value_type == "array":
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
    if value_type == "integer":
        return {"type": "integer", "enum": [1, 22, -3]}
    if value_type == "enum":
        return {"enum": rng.sample(["x", "y z", 1, None], 2)}
    return {"type": value_type}


def chat(service: ServiceThread, schema: dict[str, Any], seed: int) -> tuple[str, str]:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "thinking_token_budget": THINKING_TOKENS,
        "max_tokens": MAX_TOKENS,
        "temperature": 0.1,
        "seed": seed,
    }
    choice = post(service, "/v1/chat/completions", body).json["choices"][0]
    message = choice["message"]
    return message["content"], message.get("reasoning_content", "")


def responses(service: ServiceThread, schema: dict[str, Any], seed: int) -> tuple[str, str]:
    body = {
        "input": "x",
        "text": {"format": {"type": "json_schema", "schema": schema}},
        "thinking_token_budget": THINKING_TOKENS,
        "max_output_tokens": MAX_TOKENS,
        "temperature": 0.1,
        "seed": seed,
    }
    items = post(service, "/v1/responses", body).json["output"]
    texts = {item["type"]: item["content"][0]["text"] for item in items}
    return texts["message"], texts.get("reasoning", "")


def messages(service: ServiceThread, schema: dict[str, Any], seed: int) -> tuple[str, str]:
    body = {
        "messages": [{"role": "user", "content": f"x{seed}"}],
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
        "thinking": {"type": "enabled", "budget_tokens": THINKING_TOKENS},
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    blocks = post(service, "/v1/messages", body).json["content"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    return text, "".join(block.get("thinking", "") for block in blocks)


def ollama(service: ServiceThread, schema: dict[str, Any], seed: int) -> tuple[str, str]:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "format": schema,
        "think": True,
        "stream": False,
        "options": {"num_predict": MAX_TOKENS, "temperature": 0.1, "seed": seed},
    }
    message = post(service, "/api/chat", body).json["message"]
    return message["content"], message.get("thinking", "")


DIALECTS = {"chat": chat, "responses": responses, "messages": messages, "ollama": ollama}
COUNT = 5


@pytest.fixture(autouse=True)
def ollama_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ollama has no budget, and the test model ends no thinking by itself."""

    def with_budget(
        chat: ChatRequest, processor: TextProcessor, thinks: Any, effort: str | None
    ) -> ChatRequest:
        return with_thinking(chat, processor, thinks, THINKING_TOKENS, effort)

    monkeypatch.setattr(ollama_route, "with_thinking", with_budget)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_answer_after_thinking_fits_its_schema(service: ServiceThread, dialect: str) -> None:
    check_schemas(service, dialect, COUNT)


def check_schemas(service: ServiceThread, dialect: str, count: int) -> None:
    for seed in range(count):
        schema = random_schema(random.Random(seed))
        text, thinking = DIALECTS[dialect](service, schema, seed)
        assert thinking, (dialect, seed)
        assert is_valid(json.loads(text), schema, schema), (schema, text)
