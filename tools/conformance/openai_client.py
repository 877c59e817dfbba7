"""OpenAI's Python client, whose types parse every answer: sync, async, streams, tools, schemas."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

from tools.conformance.client_checks import (
    CITY_SCHEMA,
    MESSAGES,
    ClientChecks,
    assert_equal,
    catch_error,
)
from tools.conformance.suite import SuiteResult

TITLE = (
    "OpenAI's Python client: sync, async, streaming, functions, structured output, responses, "
    "embeddings"
)
PACKAGE = "openai"
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather", "parameters": CITY_SCHEMA},
}
FLAT_TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Weather",
    "parameters": CITY_SCHEMA,
    "strict": True,
}
CHECKS = ClientChecks()


def run(base_url: str, model: str, out: Path) -> SuiteResult:  # noqa: ARG001  the suite leaves no logs
    """Every check by itself; one that fails says what it saw."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300) as client:
        return CHECKS.run(client, model)


def chat(client: Any, model: str, **more: Any) -> Any:
    """A greedy chat completion of few tokens."""
    request = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, **more}
    return client.chat.completions.create(model=model, **request)


def respond(client: Any, model: str, **more: Any) -> Any:
    """A greedy response of few tokens."""
    return client.responses.create(
        model=model, **{"input": MESSAGES, "temperature": 0, "max_output_tokens": 12, **more}
    )


@CHECKS.add("models: list, retrieve")
def _models(client: Any, model: str) -> None:
    assert_equal(
        model in [each.id for each in client.models.list()], True, "the list holds the model"
    )
    assert_equal(client.models.retrieve(model).id, model, "id")


@CHECKS.add("chat: whole")
def _chat(client: Any, model: str) -> None:
    answer = chat(client, model)
    choice = answer.choices[0]
    assert_equal(
        (choice.message.role, choice.message.refusal, choice.finish_reason),
        ("assistant", None, "length"),
        "choice",
    )
    assert_equal(bool(choice.message.content.strip()), True, "there is text")
    assert_equal((answer.object, answer.usage.completion_tokens), ("chat.completion", 12), "usage")
    assert_equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 12, "total")


@CHECKS.add("chat: streamed, the same text, with usage")
def _streamed(client: Any, model: str) -> None:
    chunks = list(chat(client, model, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert_equal(text, chat(client, model).choices[0].message.content, "text")
    assert_equal(
        (chunks[0].choices[0].delta.role, chunks[-2].choices[0].finish_reason),
        ("assistant", "length"),
        "ends",
    )
    assert_equal((chunks[-1].choices, chunks[-1].usage.completion_tokens), ([], 12), "usage")


@CHECKS.add("chat: the stream helper")
def _helper(client: Any, model: str) -> None:
    # the helper takes a cut answer for an error
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, temperature=0, max_tokens=64
    ) as stream:
        event_types = {event.type for event in stream}
        final = stream.get_final_completion()
    assert_equal(
        event_types >= {"chunk", "content.delta", "content.done"}, True, f"events {event_types}"
    )
    assert_equal(
        final.choices[0].message.content,
        chat(client, model, max_tokens=64).choices[0].message.content,
        "text",
    )


def async_client(client: Any) -> Any:
    """An AsyncOpenAI of the same server."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0, timeout=300)


@CHECKS.add("chat: async, eight at once, the same text")
def _async(client: Any, model: str) -> None:
    async def ask() -> list[str]:
        async with async_client(client) as other:
            answers = await asyncio.gather(*(chat(other, model) for _ in range(8)))
            return [answer.choices[0].message.content for answer in answers]

    assert_equal(set(asyncio.run(ask())), {chat(client, model).choices[0].message.content}, "texts")


@CHECKS.add("chat: async, streamed")
def _async_streamed(client: Any, model: str) -> None:
    async def ask() -> str:
        async with async_client(client) as other:
            stream = await chat(other, model, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert_equal(asyncio.run(ask()), chat(client, model).choices[0].message.content, "text")


@CHECKS.add("chat: log-probabilities")
def _logprobs(client: Any, model: str) -> None:
    logprobs = chat(client, model, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert_equal(
        (len(logprobs), {len(each.top_logprobs) for each in logprobs}), (12, {3}), "entries"
    )
    assert_equal(
        all(each.logprob == each.top_logprobs[0].logprob for each in logprobs),
        True,
        "greedy takes the likeliest",
    )


@CHECKS.add("chat: n, seed, stop, logit_bias")
def _sampling_options(client: Any, model: str) -> None:
    options = {"temperature": 1.0, "seed": 3, "n": 3}
    first, again = (
        [c.message.content for c in chat(client, model, **options).choices] for _ in range(2)
    )
    assert_equal(first, again, "seeded texts")
    assert_equal(len(set(first)) > 1, True, "samples differ")
    text = chat(client, model).choices[0].message.content
    stopped = chat(client, model, stop=[text[4:8]]).choices[0]
    assert_equal(
        (stopped.message.content, stopped.finish_reason),
        (text[: text.index(text[4:8])], "stop"),
        "stopped",
    )
    assert_equal(
        chat(client, model, logit_bias={"28": 100}, max_tokens=2).usage.completion_tokens,
        2,
        "tokens",
    )


@CHECKS.add("functions: required, and the answer to its result")
def _function(client: Any, model: str) -> None:
    answer = chat(client, model, tools=[TOOL], tool_choice="required", max_tokens=80).choices[0]
    assert_equal(answer.finish_reason, "tool_calls", "finish_reason")
    (call,) = answer.message.tool_calls
    assert_equal(call.function.name, "weather", "name")
    assert_equal(
        json.loads(call.function.arguments)["city"] in ("Paris", "Rome"),
        True,
        call.function.arguments,
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 25 degrees"}
    messages = [*MESSAGES, answer.message.model_dump(exclude_none=True), result]
    assert_equal(
        bool(chat(client, model, messages=messages, tools=[TOOL]).choices[0].message.content),
        True,
        "an answer",
    )


@CHECKS.add("functions: a named one, streamed")
def _function_streamed(client: Any, model: str) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    options: Any = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 80}
    unstreamed = chat(client, model, **options).choices[0].message.tool_calls[0].function
    name = arguments = ""
    finish = None
    for chunk in chat(client, model, stream=True, **options):
        finish = chunk.choices[0].finish_reason or finish
        for call in chunk.choices[0].delta.tool_calls or ():
            assert_equal(call.index, 0, "index")
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert_equal(
        (name, arguments, finish), (unstreamed.name, unstreamed.arguments, "tool_calls"), "call"
    )


@CHECKS.add("structured output: parsed into a pydantic class")
def _parsed(client: Any, model: str) -> None:
    from typing import Literal

    from pydantic import BaseModel

    class Place(BaseModel):
        city: Literal["Paris", "Rome"]
        large: bool

    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Place, temperature=0, max_tokens=60
    )
    assert_equal(type(answer.choices[0].message.parsed), Place, "parsed")
    parsed = client.responses.parse(
        model=model, input=MESSAGES, text_format=Place, temperature=0, max_output_tokens=60
    )
    assert_equal(parsed.output_parsed, answer.choices[0].message.parsed, "the response's")


@CHECKS.add("completions: whole, streamed, several, echo with log-probabilities")
def _completions(client: Any, model: str) -> None:
    options: Any = {"model": model, "max_tokens": 8, "temperature": 0}
    prompts = ["The capital of France is", "One, two, three,"]
    both = client.completions.create(prompt=prompts, **options)
    alone = [client.completions.create(prompt=each, **options).choices[0].text for each in prompts]
    assert_equal([choice.text for choice in both.choices], alone, "texts")
    chunks = list(client.completions.create(prompt=prompts[0], stream=True, **options))
    assert_equal("".join(chunk.choices[0].text for chunk in chunks), alone[0], "streamed")
    echo = client.completions.create(
        model=model, prompt=prompts[0], max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    assert_equal(echo.text, prompts[0], "echo")
    assert_equal(echo.logprobs.token_logprobs[0], None, "the first token's")
    assert_equal(all(value <= 0 for value in echo.logprobs.token_logprobs[1:]), True, "the others'")


@CHECKS.add("responses: the text of the chat, whole and streamed")
def _responses(client: Any, model: str) -> None:
    text = chat(client, model).choices[0].message.content
    unstreamed = respond(client, model)
    assert_equal((unstreamed.output_text, unstreamed.status), (text, "incomplete"), "response")
    assert_equal(unstreamed.incomplete_details.reason, "max_output_tokens", "reason")
    assert_equal(
        (unstreamed.usage.output_tokens, unstreamed.usage.output_tokens_details.reasoning_tokens),
        (12, 0),
        "usage",
    )
    assert_equal(
        respond(client, model, input=MESSAGES[0]["content"]).output_text, text, "of a text"
    )
    with client.responses.stream(
        model=model, input=MESSAGES, temperature=0, max_output_tokens=12
    ) as stream:
        event_types = [event.type for event in stream]
    assert_equal(
        (event_types[0], event_types[-1]), ("response.created", "response.incomplete"), "events"
    )
    events = list(respond(client, model, stream=True))
    assert_equal(
        "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        text,
        "deltas",
    )


@CHECKS.add("responses: a function, its result, streamed arguments")
def _responses_function(client: Any, model: str) -> None:
    options: Any = {"tools": [FLAT_TOOL], "tool_choice": "required", "max_output_tokens": 80}
    (call,) = respond(client, model, **options).output
    assert_equal((call.type, call.name), ("function_call", "weather"), "call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    messages = [*MESSAGES, call.model_dump(exclude_none=True), result]
    assert_equal(
        bool(respond(client, model, input=messages, tools=[FLAT_TOOL]).output_text),
        True,
        "an answer",
    )
    events = list(respond(client, model, stream=True, **options))
    pieces = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    assert_equal("".join(pieces), call.arguments, "arguments")


@CHECKS.add("responses: async, streamed")
def _responses_async(client: Any, model: str) -> None:
    async def ask() -> str:
        async with async_client(client) as other:
            stream = await respond(other, model, stream=True)
            return "".join(
                [
                    event.delta
                    async for event in stream
                    if event.type == "response.output_text.delta"
                ]
            )

    assert_equal(asyncio.run(ask()), respond(client, model).output_text, "text")


@CHECKS.add("responses: previous_response_id, retrieve, input items, delete")
def _stored(client: Any, model: str) -> None:
    import openai

    first = respond(client, model)
    second = respond(client, model, input="Two more.", previous_response_id=first.id)
    items = [*MESSAGES, *first.output, {"role": "user", "content": "Two more."}]
    assert_equal(respond(client, model, input=items).output_text, second.output_text, "text")
    assert_equal(client.responses.retrieve(first.id).output_text, first.output_text, "retrieved")
    assert_equal(len(client.responses.input_items.list(first.id).data), 1, "input items")
    client.responses.delete(first.id)
    catch_error(openai.NotFoundError, lambda: client.responses.retrieve(first.id))


@CHECKS.add("embeddings: one, many, floats and base64, dimensions")
def _embeddings(client: Any, model: str) -> None:
    texts = ["a cat", "a dog and a much longer sentence about it", "a cat"]
    # the client requests base64 by default
    packed = client.embeddings.create(model=model, input=texts)
    plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
    assert_equal([each.index for each in plain.data], [0, 1, 2], "index")
    for one, two in zip(packed.data, plain.data):
        worst = max(abs(a - b) for a, b in zip(one.embedding, two.embedding, strict=True))
        assert_equal(worst < 1e-6, True, f"base64 and floats differ by {worst}")
    cat, dog, again = (each.embedding for each in plain.data)
    assert_equal(abs(math.fsum(x * x for x in cat) - 1) < 1e-5, True, "length 1")
    assert_equal(max(abs(a - b) for a, b in zip(cat, again)) < 1e-6, True, "the same text")
    assert_equal(math.fsum(a * b for a, b in zip(cat, dog)) < 0.999, True, "another text")
    short = client.embeddings.create(model=model, input="a cat", dimensions=16).data[0].embedding
    assert_equal(len(short), 16, "dimensions")
    assert_equal(plain.usage.total_tokens, plain.usage.prompt_tokens, "usage")


@CHECKS.add("errors: the client's own classes, and a request id")
def _errors(client: Any, model: str) -> None:
    import openai

    error = catch_error(openai.BadRequestError, lambda: chat(client, model, temperature=9))
    assert_equal(
        (error.status_code, error.param, error.type),
        (400, "temperature", "invalid_request_error"),
        "error",
    )
    error = catch_error(openai.NotFoundError, lambda: chat(client, "nobody"))
    assert_equal(error.code, "model_not_found", "code")
    error = catch_error(
        openai.BadRequestError,
        lambda: chat(client, model, messages=MESSAGES, extra_body={"odd": 1}),
    )
    assert_equal(error.param, "odd", "param")
    catch_error(
        openai.BadRequestError, lambda: respond(client, model, previous_response_id="resp_1")
    )
    answer = client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, max_tokens=1
    )
    assert_equal(bool(answer.headers["x-request-id"]), True, "x-request-id")
