"""OpenAI's own Python client, whose types read every answer: sync, async, streamed, functions, structured output."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.conformance.suite import Result, of

TITLE = "OpenAI's Python client: sync, async, streaming, functions, structured output, responses, embeddings"
PACKAGE = "openai"
TALK: list[Any] = [{"role": "user", "content": "Name three fruits, please."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}
FLAT: Any = {"type": "function", "name": "weather", "description": "Weather", "parameters": PARAMETERS, "strict": True}
CHECKS: list[tuple[str, Callable[[Any, str], None]]] = []


def run(base_url: str, model: str, out: Path) -> Result:  # noqa: ARG001  the suite leaves no logs
    """Every check by itself; one that fails says what it saw."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300) as client:
        return of([(name, _problem(check, client, model)) for name, check in CHECKS])


def _problem(check: Callable[[Any, str], None], client: Any, model: str) -> str | None:
    try:
        check(client, model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def check(name: str) -> Callable[[Callable[[Any, str], None]], Callable[[Any, str], None]]:
    """Adds a function to the checks."""

    def add(function: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
        CHECKS.append((name, function))
        return function

    return add


def expect(seen: Any, wanted: Any, what: str) -> None:
    """Raises AssertionError unless they are equal."""
    if seen != wanted:
        raise AssertionError(f"{what}: {seen!r} is not {wanted!r}"[:300])


def raised(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """The error of that kind that a call ends with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def chat(client: Any, model: str, **more: Any) -> Any:
    """A greedy chat completion of few tokens."""
    given = {"messages": TALK, "temperature": 0, "max_tokens": 12, **more}
    return client.chat.completions.create(model=model, **given)


def respond(client: Any, model: str, **more: Any) -> Any:
    """A greedy response of few tokens."""
    return client.responses.create(model=model, **{"input": TALK, "temperature": 0, "max_output_tokens": 12, **more})


@check("models: list, retrieve")
def _models(client: Any, model: str) -> None:
    expect(model in [each.id for each in client.models.list()], True, "the list holds the model")
    expect(client.models.retrieve(model).id, model, "id")


@check("chat: whole")
def _chat(client: Any, model: str) -> None:
    answer = chat(client, model)
    choice = answer.choices[0]
    expect((choice.message.role, choice.message.refusal, choice.finish_reason), ("assistant", None, "length"), "choice")
    expect(bool(choice.message.content.strip()), True, "there is text")
    expect((answer.object, answer.usage.completion_tokens), ("chat.completion", 12), "usage")
    expect(answer.usage.total_tokens, answer.usage.prompt_tokens + 12, "total")


@check("chat: streamed, the same text, with usage")
def _streamed(client: Any, model: str) -> None:
    chunks = list(chat(client, model, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(text, chat(client, model).choices[0].message.content, "text")
    expect((chunks[0].choices[0].delta.role, chunks[-2].choices[0].finish_reason), ("assistant", "length"), "ends")
    expect((chunks[-1].choices, chunks[-1].usage.completion_tokens), ([], 12), "usage")


@check("chat: the stream helper")
def _helper(client: Any, model: str) -> None:
    # the helper takes a cut answer for an error
    with client.chat.completions.stream(model=model, messages=TALK, temperature=0, max_tokens=64) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    expect(kinds >= {"chunk", "content.delta", "content.done"}, True, f"events {kinds}")
    expect(final.choices[0].message.content, chat(client, model, max_tokens=64).choices[0].message.content, "text")


@check("chat: async, eight at once, the same text")
def _async(client: Any, model: str) -> None:
    async def ask() -> list[str]:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0, timeout=300) as other:
            answers = await asyncio.gather(*(chat(other, model) for _ in range(8)))
            return [answer.choices[0].message.content for answer in answers]

    expect(set(asyncio.run(ask())), {chat(client, model).choices[0].message.content}, "texts")


@check("chat: async, streamed")
def _async_streamed(client: Any, model: str) -> None:
    async def ask() -> str:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0, timeout=300) as other:
            stream = await chat(other, model, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    expect(asyncio.run(ask()), chat(client, model).choices[0].message.content, "text")


@check("chat: log-probabilities")
def _logprobs(client: Any, model: str) -> None:
    told = chat(client, model, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    expect((len(told), {len(each.top_logprobs) for each in told}), (12, {3}), "entries")
    expect(all(each.logprob == each.top_logprobs[0].logprob for each in told), True, "greedy takes the likeliest")


@check("chat: n, seed, stop, logit_bias")
def _knobs(client: Any, model: str) -> None:
    how = {"temperature": 1.0, "seed": 3, "n": 3}
    first, again = ([c.message.content for c in chat(client, model, **how).choices] for _ in range(2))
    expect(first, again, "seeded texts")
    expect(len(set(first)) > 1, True, "samples differ")
    text = chat(client, model).choices[0].message.content
    stopped = chat(client, model, stop=[text[4:8]]).choices[0]
    expect((stopped.message.content, stopped.finish_reason), (text[: text.index(text[4:8])], "stop"), "stopped")
    expect(chat(client, model, logit_bias={"28": 100}, max_tokens=2).usage.completion_tokens, 2, "tokens")


@check("functions: required, and the answer to its result")
def _function(client: Any, model: str) -> None:
    answer = chat(client, model, tools=[TOOL], tool_choice="required", max_tokens=80).choices[0]
    expect(answer.finish_reason, "tool_calls", "finish_reason")
    (call,) = answer.message.tool_calls
    expect(call.function.name, "weather", "name")
    expect(json.loads(call.function.arguments)["city"] in ("Paris", "Rome"), True, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 25 degrees"}
    talk = [*TALK, answer.message.model_dump(exclude_none=True), result]
    expect(bool(chat(client, model, messages=talk, tools=[TOOL]).choices[0].message.content), True, "an answer")


@check("functions: a named one, streamed")
def _function_streamed(client: Any, model: str) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    how: Any = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 80}
    whole = chat(client, model, **how).choices[0].message.tool_calls[0].function
    name = arguments = ""
    finish = None
    for chunk in chat(client, model, stream=True, **how):
        finish = chunk.choices[0].finish_reason or finish
        for call in chunk.choices[0].delta.tool_calls or ():
            expect(call.index, 0, "index")
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    expect((name, arguments, finish), (whole.name, whole.arguments, "tool_calls"), "call")


@check("structured output: parsed into a pydantic class")
def _parsed(client: Any, model: str) -> None:
    from typing import Literal

    from pydantic import BaseModel

    class Place(BaseModel):
        city: Literal["Paris", "Rome"]
        large: bool

    answer = client.chat.completions.parse(
        model=model, messages=TALK, response_format=Place, temperature=0, max_tokens=60
    )
    expect(type(answer.choices[0].message.parsed), Place, "parsed")
    told = client.responses.parse(model=model, input=TALK, text_format=Place, temperature=0, max_output_tokens=60)
    expect(told.output_parsed, answer.choices[0].message.parsed, "the response's")


@check("completions: whole, streamed, several, echo with log-probabilities")
def _completions(client: Any, model: str) -> None:
    how: Any = {"model": model, "max_tokens": 8, "temperature": 0}
    prompts = ["The capital of France is", "One, two, three,"]
    both = client.completions.create(prompt=prompts, **how)
    alone = [client.completions.create(prompt=each, **how).choices[0].text for each in prompts]
    expect([choice.text for choice in both.choices], alone, "texts")
    chunks = list(client.completions.create(prompt=prompts[0], stream=True, **how))
    expect("".join(chunk.choices[0].text for chunk in chunks), alone[0], "streamed")
    echo = client.completions.create(model=model, prompt=prompts[0], max_tokens=0, echo=True, logprobs=1).choices[0]
    expect(echo.text, prompts[0], "echo")
    expect(echo.logprobs.token_logprobs[0], None, "the first token's")
    expect(all(value <= 0 for value in echo.logprobs.token_logprobs[1:]), True, "the others'")


@check("responses: the text of the chat, whole and streamed")
def _responses(client: Any, model: str) -> None:
    text = chat(client, model).choices[0].message.content
    whole = respond(client, model)
    expect((whole.output_text, whole.status), (text, "incomplete"), "response")
    expect(whole.incomplete_details.reason, "max_output_tokens", "reason")
    expect((whole.usage.output_tokens, whole.usage.output_tokens_details.reasoning_tokens), (12, 0), "usage")
    expect(respond(client, model, input=TALK[0]["content"]).output_text, text, "of a text")
    with client.responses.stream(model=model, input=TALK, temperature=0, max_output_tokens=12) as stream:
        kinds = [event.type for event in stream]
    expect((kinds[0], kinds[-1]), ("response.created", "response.incomplete"), "events")
    events = list(respond(client, model, stream=True))
    expect("".join(event.delta for event in events if event.type == "response.output_text.delta"), text, "deltas")


@check("responses: a function, its result, streamed arguments")
def _responses_function(client: Any, model: str) -> None:
    how: Any = {"tools": [FLAT], "tool_choice": "required", "max_output_tokens": 80}
    (call,) = respond(client, model, **how).output
    expect((call.type, call.name), ("function_call", "weather"), "call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    talk = [*TALK, call.model_dump(exclude_none=True), result]
    expect(bool(respond(client, model, input=talk, tools=[FLAT]).output_text), True, "an answer")
    events = list(respond(client, model, stream=True, **how))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    expect("".join(pieces), call.arguments, "arguments")


@check("responses: async, streamed")
def _responses_async(client: Any, model: str) -> None:
    async def ask() -> str:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0, timeout=300) as other:
            stream = await respond(other, model, stream=True)
            return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    expect(asyncio.run(ask()), respond(client, model).output_text, "text")


@check("embeddings: one, many, floats and base64, dimensions")
def _embeddings(client: Any, model: str) -> None:
    texts = ["a cat", "a dog and a much longer sentence about it", "a cat"]
    packed = client.embeddings.create(model=model, input=texts)  # the client asks for base64 by itself
    plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
    expect([each.index for each in plain.data], [0, 1, 2], "index")
    for one, two in zip(packed.data, plain.data):
        worst = max(abs(a - b) for a, b in zip(one.embedding, two.embedding, strict=True))
        expect(worst < 1e-6, True, f"base64 and floats differ by {worst}")
    cat, dog, again = (each.embedding for each in plain.data)
    expect(abs(math.fsum(x * x for x in cat) - 1) < 1e-5, True, "length 1")
    expect(max(abs(a - b) for a, b in zip(cat, again)) < 1e-6, True, "the same text")
    expect(math.fsum(a * b for a, b in zip(cat, dog)) < 0.999, True, "another text")
    short = client.embeddings.create(model=model, input="a cat", dimensions=16).data[0].embedding
    expect(len(short), 16, "dimensions")
    expect(plain.usage.total_tokens, plain.usage.prompt_tokens, "usage")


@check("errors: the client's own classes, and a request id")
def _errors(client: Any, model: str) -> None:
    import openai

    error = raised(openai.BadRequestError, lambda: chat(client, model, temperature=9))
    expect((error.status_code, error.param, error.type), (400, "temperature", "invalid_request_error"), "error")
    error = raised(openai.NotFoundError, lambda: chat(client, "nobody"))
    expect(error.code, "model_not_found", "code")
    error = raised(openai.BadRequestError, lambda: chat(client, model, messages=TALK, extra_body={"odd": 1}))
    expect(error.param, "odd", "param")
    raised(openai.BadRequestError, lambda: respond(client, model, previous_response_id="resp_1"))
    answer = client.chat.completions.with_raw_response.create(model=model, messages=TALK, max_tokens=1)
    expect(bool(answer.headers["x-request-id"]), True, "x-request-id")
