"""Tools beside a schema: a call stays possible, and content is held to the schema.

The test model writes what a bias on one token makes it write, in every dialect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.dialects.thinking import with_thinking
from modelmill.serve.routes import ollama as ollama_route
from modelmill.text_processor import TextProcessor
from tests.serve.dialect_calls import (
    DialectAnswer,
    _message,
    _ollama,
    _response,
    events,
    join_message,
    post,
)
from tests.serve.replaced_answers import replace_answers
from tests.serve.service_thread import ServiceThread
from tests.serve.test_thinking_and_schemas import TEMPLATE, THINKING_TOKENS

pytestmark = pytest.mark.usefixtures("brief_tools")

TOWN = {
    "type": "object",
    "properties": {"town": {"enum": ["Ulm", "Bonn"]}},
    "required": ["town"],
    "additionalProperties": False,
}
FUNCTION = {"name": "f", "parameters": TOWN}
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": [1, 22]}},
    "required": ["x"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
LIMIT = 200
JSON_TEMPLATE = (
    "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}"
    "</s>{% endfor %}<s>assistant\n"
)
"""Its calls are plain JSON (``json``)."""


def chat(service: ServiceThread, strict: bool, **more: Any) -> Iterator[tuple[DialectAnswer, Any]]:
    tool = {"type": "function", "function": {**FUNCTION, "strict": strict}}
    body = {
        "messages": [{"role": "user", "content": "x"}], "tools": [tool], "max_tokens": LIMIT,
        "temperature": 0, "response_format": RESPONSE_FORMAT, **more,
    }  # fmt: skip
    whole = post(service, "/v1/chat/completions", body).json
    choice = whole["choices"][0]
    calls = [each["function"] for each in choice["message"].get("tool_calls", ())]
    yield (
        DialectAnswer(
            choice["message"]["content"] or "",
            [(each["name"], json.loads(each["arguments"])) for each in calls],
            choice["finish_reason"],
        ),
        (choice["message"].get("reasoning_content", ""), whole.get("warnings", [])),
    )
    answer, parts, thinking = DialectAnswer(), dict[int, list[str]](), ""
    for _, event in events(post(service, "/v1/chat/completions", {**body, "stream": True}).body):
        for choice in event["choices"]:
            delta = choice["delta"]
            answer.text += delta.get("content") or ""
            thinking += delta.get("reasoning_content") or ""
            answer.reason = choice["finish_reason"] or answer.reason
            for call in delta.get("tool_calls", ()):
                texts = parts.setdefault(call["index"], [])
                texts += [call["function"].get("name", ""), call["function"]["arguments"]]
    answer.calls = [(texts[0], json.loads("".join(texts[1:]))) for texts in parts.values()]
    yield answer, (thinking, whole.get("warnings", []))


def responses(
    service: ServiceThread, strict: bool, **more: Any
) -> Iterator[tuple[DialectAnswer, Any]]:
    body = {
        "input": "x", "tools": [{"type": "function", **FUNCTION, "strict": strict}],
        "text": {"format": {**FORMAT, "name": "a"}}, "max_output_tokens": LIMIT, "temperature": 0,
        **more,
    }  # fmt: skip
    whole = post(service, "/v1/responses", body).json
    last = [*events(post(service, "/v1/responses", {**body, "stream": True}).body)][-1][1]
    for value in (whole, last["response"]):
        thoughts = [item for item in value["output"] if item["type"] == "reasoning"]
        thinking = "".join(part["text"] for item in thoughts for part in item["content"])
        value["output"] = [item for item in value["output"] if item not in thoughts]
        yield _response(value), (thinking, value.get("warnings", []))


def messages(
    service: ServiceThread, strict: bool, **more: Any
) -> Iterator[tuple[DialectAnswer, Any]]:
    if "thinking_token_budget" in more:
        budget = {"type": "enabled", "budget_tokens": more.pop("thinking_token_budget")}
        more["thinking"] = budget
    if "parallel_tool_calls" in more:
        more["tool_choice"] = {
            "type": "auto", "disable_parallel_tool_use": not more.pop("parallel_tool_calls")
        }  # fmt: skip
    body = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": LIMIT, "temperature": 0,
        "tools": [{"name": "f", "input_schema": TOWN, "strict": strict}],
        "output_config": {"format": FORMAT}, **more,
    }  # fmt: skip
    whole = post(service, "/v1/messages", body).json
    streamed = join_message(post(service, "/v1/messages", {**body, "stream": True}).body)
    for value in (whole, streamed):
        thinking = "".join(block.get("thinking", "") for block in value["content"])
        yield _message(value), (thinking, whole.get("warnings", []))


def ollama(
    service: ServiceThread, strict: bool, **more: Any
) -> Iterator[tuple[DialectAnswer, Any]]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "x"}], "format": SCHEMA,
        "tools": [{"type": "function", "function": FUNCTION}],
        "options": {"temperature": 0, "num_predict": LIMIT},
    }  # fmt: skip
    if "thinking_token_budget" in more:
        body["think"] = True
    whole = [post(service, "/api/chat", {**body, "stream": False}).json]
    lines = map(json.loads, post(service, "/api/chat", body).body.decode().splitlines())
    for each in (whole, list(lines)):
        thinking = "".join(line["message"].get("thinking", "") for line in each)
        yield _ollama(each), (thinking, each[-1].get("warnings", []))


DIALECTS = {"chat": chat, "responses": responses, "messages": messages, "ollama": ollama}


@pytest.fixture
def prefer(running: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Prefers a character in every answer, also of dialects that take no bias; or avoids it."""

    tokenizer = running.engine.text_processor.tokenizer
    texts = {id: tokenizer.token_bytes(id).decode("utf-8", "replace") for id in range(512)}

    def bias(char: str, amount: float, ends: float = 50.0) -> None:
        # short: no blanks, free arguments and answers end where they can
        biases = {"}": 40.0, char: amount}
        values = {id: biases[text] for id, text in texts.items() if text in biases}
        blanks = {id: -60.0 for id, text in texts.items() if text.isspace()}
        monkeypatch.setattr(
            "modelmill.serve.generation_schema.parse_logit_bias",
            lambda _: {**blanks, **values, **dict.fromkeys(tokenizer.eos_ids, ends)},
        )

    return bias


@pytest.fixture
def ollama_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ollama has no budget, and the test model ends no thinking by itself."""

    def with_budget(
        chat: ChatRequest, processor: TextProcessor, thinks: Any, effort: str | None
    ) -> ChatRequest:
        return with_thinking(chat, processor, thinks, THINKING_TOKENS if thinks else None, effort)

    monkeypatch.setattr(ollama_route, "with_thinking", with_budget)


def check_both(service: ServiceThread, dialect: str, prefer: Any, strict: bool, **more: Any) -> Any:
    prefer("<", 100.0)
    for answer, (thinking, warnings) in DIALECTS[dialect](service, strict, **more):
        assert answer.text == ""
        assert answer.calls
        assert answer.reason == "tool_calls"
        assert all(name == "f" for name, _ in answer.calls)
        if dialect != "ollama":  # which has no strict tools
            assert all(value["town"] in TOWN_NAMES for _, value in answer.calls)
        assert warnings == []
        yield answer, thinking
    prefer("<", -100.0)
    for answer, (thinking, warnings) in DIALECTS[dialect](service, strict, **more):
        assert answer.calls == []
        assert json.loads(answer.text)["x"] in (1, 22)
        assert answer.reason == "stop"
        assert warnings == []
        yield answer, thinking


TOWN_NAMES = ("Ulm", "Bonn")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_call_or_content_of_the_schema(running: ServiceThread, dialect: str, prefer: Any) -> None:
    answers = [each for each, _ in check_both(running, dialect, prefer, strict=True)]
    assert answers[0].calls == answers[1].calls
    assert answers[2].text == answers[3].text


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.usefixtures("ollama_budget")
def test_a_call_or_content_of_the_schema_after_thinking(
    running: ServiceThread, dialect: str, prefer: Any
) -> None:
    with running.other_template(TEMPLATE) as service:
        budget = {"thinking_token_budget": THINKING_TOKENS}
        for _, thinking in check_both(service, dialect, prefer, strict=True, **budget):
            assert thinking


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_one_call_where_parallel_ones_are_off(
    running: ServiceThread, dialect: str, prefer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelmill.text.tool_grammar.MAX_CONSTRAINED_CALLS", 2)
    prefer("<", 100.0, ends=-50.0)
    for several in (False, True):
        for answer, _ in DIALECTS[dialect](running, True, parallel_tool_calls=several):
            assert len(answer.calls) == (2 if several else 1)


def test_arguments_that_are_not_strict_are_any_object(running: ServiceThread, prefer: Any) -> None:
    prefer("<", 100.0)
    body = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "temperature": 1.5,
        "tools": [{"type": "function", "function": FUNCTION}], "n": 6, "seed": 1,
        "response_format": RESPONSE_FORMAT,
    }  # fmt: skip
    choices = post(running, "/v1/chat/completions", body).json["choices"]
    called = [choice["message"].get("tool_calls", []) for choice in choices]
    assert {call["function"]["arguments"] for calls in called for call in calls} == {"{}"}


@pytest.mark.parametrize("choice", ["none", "required"])
def test_other_choices_are_as_before(running: ServiceThread, choice: str, prefer: Any) -> None:
    prefer("<", 100.0 if choice == "none" else -100.0)
    for answer, (_, warnings) in chat(running, True, tool_choice=choice):
        if choice == "none":
            assert (answer.calls, warnings) == ([], [])
            assert json.loads(answer.text)["x"] in (1, 22)
        else:
            assert [name for name, _ in answer.calls] == ["f"]
            assert warnings == ["response_format: it has no effect where a call is forced"]


def test_text_of_a_call_inside_content_is_content(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"x": '<tool_call>{"name": "f", "arguments": {"town": "Ulm"}}</tool_call>'})
    inner = '{"x": "<tool_call>{"name": "f", "arguments": {}}</tool_call>"}'
    for answer in (text, inner):
        with monkeypatch.context() as patch:
            replace_answers(patch, answer, 20)
            tokens = -(-len(answer) // 20)
            for each, _ in chat(running, False, max_tokens=tokens):
                assert (each.text, each.calls) == (answer, [])


@pytest.mark.parametrize(("text", "calls"), [
    ('[{"name": "f", "arguments": {"town": "Ulm"}}]', [("f", {"town": "Ulm"})]),
    ('{"name": "f", "arguments": {"town": "Ulm"}}', [("f", {"town": "Ulm"})]),
    ('{"name": "g", "arguments": {"town": "Ulm"}}', []), ('{"x": 1}', []), ('{"name": "f"}', []),
])  # fmt: skip
def test_plain_json_is_a_call_where_it_begins_as_one(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch, text: str, calls: Any
) -> None:
    with running.other_template(JSON_TEMPLATE) as service:
        replace_answers(monkeypatch, text, 12)
        limit = -(-len(text) // 12)
        for answer, (_, warnings) in chat(service, False, max_tokens=limit):
            assert (answer.text, answer.calls) == ("" if calls else text, calls)
            assert warnings == []
        any_object = {"type": "json_object"}
        for answer, (_, warnings) in chat(
            service, False, response_format=any_object, max_tokens=limit
        ):
            assert answer.calls == calls
            assert warnings == [
                "response_format: content that begins as this model's calls of f do is such a call"
            ]
        for answer, (_, warnings) in chat(
            service, True, response_format=any_object, max_tokens=limit
        ):
            assert (answer.text, answer.calls) == (text, [])
            assert len(warnings) == 1
            assert warnings[0].startswith("response_format: no tool can be called beside it: this ")


@pytest.mark.parametrize(("path", "body", "field"), [
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}},
                       "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 2},
     "text.format"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "format": "json",
                   "stream": False, "tools": [{"type": "function", "function": FUNCTION}],
                   "options": {"num_predict": 2}}, "format"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2,
                      "output_config": {"format": {"type": "json_schema",
                                                   "schema": {"type": "object"}}},
                      "tools": [{"name": "f", "input_schema": TOWN}]}, "output_config.format"),
])  # fmt: skip
def test_a_warning_names_the_field_of_its_dialect(
    running: ServiceThread, path: str, body: Any, field: str
) -> None:
    with running.other_template(JSON_TEMPLATE) as service:
        (warning,) = post(service, path, body).json["warnings"]
    assert warning == f"{field}: content that begins as this model's calls of f do is such a call"


def test_a_regex_holds_the_whole_answer_which_a_warning_says(running: ServiceThread) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 9,
        "tools": [{"type": "function", "function": FUNCTION}],
        "structured_outputs": {"regex": "yes|no"},
    }  # fmt: skip
    answer = post(running, "/v1/chat/completions", body).json
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")
    assert answer["warnings"] == [
        "structured_outputs: it holds the whole answer, so that a tool can be called only where "
        "it allows the text of a call"
    ]


def test_parameters_that_no_grammar_takes_are_no_error(running: ServiceThread) -> None:
    odd: dict[str, Any] = {
        "name": "odd",
        "parameters": {"type": "object", "properties": {"a": {"$ref": "#/no"}}},
    }
    body = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 2,
        "tools": [{"type": "function", "function": odd}], "response_format": RESPONSE_FORMAT,
    }  # fmt: skip
    assert "warnings" not in post(running, "/v1/chat/completions", body).json
    odd["strict"] = True
    response = running.post("/v1/chat/completions", {"model": "stories", **body})
    assert response.status == 400
    assert response.json["error"]["message"].startswith("tools: the parameters of odd: ")
