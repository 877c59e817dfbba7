"""Anthropic's Python client, whose types parse every answer: streams, tools, counts, errors."""

from __future__ import annotations

import asyncio
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

TITLE = "Anthropic's Python client: messages, streaming, tools, token counts, models, errors"
PACKAGE = "anthropic"
TOOL: Any = {
    "name": "weather",
    "description": "Weather",
    "input_schema": CITY_SCHEMA,
}
PAGE_TOKENS = 16
"""Tokens of a page of the KV cache: a prefix is cached in whole pages."""
CHECKS = ClientChecks()


def run(base_url: str, model: str, out: Path) -> SuiteResult:  # noqa: ARG001  the suite leaves no logs
    """Every check by itself."""
    from anthropic import Anthropic

    url = base_url.removesuffix("/v1")
    with Anthropic(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        return CHECKS.run(client, model)


def ask(client: Any, model: str, **more: Any) -> Any:
    """A greedy message of few tokens."""
    request = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, **more}
    # newer clients leave sampling fields to extra_body
    request["extra_body"] = {"temperature": request.pop("temperature")}
    return client.messages.create(model=model, **request)


@CHECKS.add("models: list, retrieve")
def _models(client: Any, model: str) -> None:
    assert_equal(model in [each.id for each in client.models.list()], True, "the list")
    assert_equal(client.models.retrieve(model).type, "model", "type")


@CHECKS.add("messages: whole")
def _whole(client: Any, model: str) -> None:
    message = ask(client, model)
    head = message.type, message.role, message.model
    assert_equal(head, ("message", "assistant", model), "head")
    assert_equal((message.stop_reason, message.stop_sequence), ("max_tokens", None), "stop")
    assert_equal([block.type for block in message.content], ["text"], "blocks")
    assert_equal(message.usage.output_tokens, 12, "output tokens")


@CHECKS.add("messages: the prompt that is in the cache is not input")
def _cached(client: Any, model: str) -> None:
    system = [
        {
            "type": "text",
            "text": "You know all fruits. " * 20,
            "cache_control": {"type": "ephemeral"},
        }
    ]
    first = ask(client, model, system=system)
    second = ask(client, model, system=system)
    counts = [
        each.usage.input_tokens + each.usage.cache_read_input_tokens for each in (first, second)
    ]
    assert_equal(counts[0], counts[1], "the prompt's length")
    assert_equal(second.usage.cache_read_input_tokens >= counts[0] - 32, True, "cached")
    assert_equal(second.content[0].text, first.content[0].text, "text")


@CHECKS.add("messages: a billing header that changes keeps the cached prefix")
def _billing(client: Any, model: str) -> None:
    texts = "You know all vegetables. " * 20

    def system(version: str) -> list[Any]:
        header = f"x-anthropic-billing-header: cc_version=2.{version}; cch={version};"
        return [{"type": "text", "text": header}, {"type": "text", "text": texts}]

    first = ask(client, model, system=system("11111"))
    second = ask(client, model, system=system("22222"))
    prompt = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert_equal(second.usage.cache_read_input_tokens >= prompt - 32, True, "cached")


@CHECKS.add("an agent's session: each turn finds all but a page of the earlier prompt in the cache")
def _session(client: Any, model: str) -> None:
    """The header changes, the cache marks move on, two calls a turn."""
    guide = "Read the file, run the test, then write the code. " * 30
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Fix the bug."}]}]
    earlier = 0
    for turn in range(4):
        header = f"x-anthropic-billing-header: cc_version=2.{turn}; cch={turn}5{turn}3;"
        system = [{"type": "text", "text": header}, {"type": "text", "text": guide}]
        *before, last = history
        *blocks, end = last["content"]
        marked = {**last, "content": [*blocks, {**end, "cache_control": {"type": "ephemeral"}}]}
        usage = ask(
            client, model, system=system, tools=[TOOL], messages=[*before, marked], max_tokens=4
        ).usage
        cached = usage.cache_read_input_tokens
        if turn > 1:
            assert_equal(cached > earlier - 2 * PAGE_TOKENS, True, f"{cached} of {earlier}")
        earlier = usage.input_tokens + cached
        ids = [f"call_{turn}_{number}" for number in range(2)]
        calls = [
            {"type": "tool_use", "id": id, "name": "weather", "input": {"city": "Rome"}}
            for id in ids
        ]
        results = [{"type": "tool_result", "tool_use_id": id, "content": "Sun"} for id in ids]
        history += [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]


@CHECKS.add("messages: the stream helper, the same message")
def _stream(client: Any, model: str) -> None:
    whole = ask(client, model, max_tokens=24)
    with client.messages.stream(
        model=model, messages=MESSAGES, max_tokens=24, extra_body={"temperature": 0}
    ) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_message()
    assert_equal(final.content[0].text, whole.content[0].text, "text")
    assert_equal(final.stop_reason, whole.stop_reason, "stop_reason")
    assert_equal(final.usage.output_tokens, whole.usage.output_tokens, "output tokens")
    assert_equal((names[0], names[-1]), ("message_start", "message_stop"), "order")


@CHECKS.add("messages: async, streamed")
def _async(client: Any, model: str) -> None:
    from anthropic import AsyncAnthropic

    async def call() -> str:
        more: Any = {"max_tokens": 12, "extra_body": {"temperature": 0}}
        async with (
            AsyncAnthropic(base_url=str(client.base_url), api_key="none") as other,
            other.messages.stream(model=model, messages=MESSAGES, **more) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert_equal(asyncio.run(call()), ask(client, model).content[0].text, "text")


@CHECKS.add("messages: a stop sequence, and an answer that has begun")
def _stops(client: Any, model: str) -> None:
    text = ask(client, model, max_tokens=24).content[0].text
    stop = text[8:12]
    message = ask(client, model, max_tokens=24, stop_sequences=[stop])
    assert_equal((message.stop_reason, message.stop_sequence), ("stop_sequence", stop), "stop")
    start = {"role": "assistant", "content": text[:5]}
    message = ask(client, model, messages=[*MESSAGES, start])
    assert_equal(message.content[0].text.startswith(text[:5]), False, "only the rest")


@CHECKS.add("tools: forced, the result comes back, streamed input")
def _tools(client: Any, model: str) -> None:
    more: Any = {
        "tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 64,
    }  # fmt: skip
    message = ask(client, model, **more)
    assert_equal(message.stop_reason, "tool_use", "stop_reason")
    call = message.content[-1]
    assert_equal((call.type, call.name, set(call.input)), ("tool_use", "weather", {"city"}), "call")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun, 20 degrees"}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    assert_equal(
        bool(ask(client, model, messages=history, tools=[TOOL]).content), True, "an answer"
    )
    with client.messages.stream(
        model=model, messages=MESSAGES, extra_body={"temperature": 0}, **more
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert_equal(final.content[-1].input, call.input, "input")
    assert_equal(len(pieces) > 1, True, "several deltas")


@CHECKS.add("output_config.format: JSON of a schema")
def _format(client: Any, model: str) -> None:
    schema = TOOL["input_schema"]
    message = ask(
        client,
        model,
        max_tokens=64,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert_equal("city" in message.content[0].text, True, "a city")


@CHECKS.add("count_tokens: what a message counts")
def _count(client: Any, model: str) -> None:
    usage = ask(client, model, system="Be brief.").usage
    count = client.messages.count_tokens(model=model, messages=MESSAGES, system="Be brief.")
    assert_equal(count.input_tokens, usage.input_tokens + usage.cache_read_input_tokens, "tokens")


@CHECKS.add("errors: the client's own classes")
def _errors(client: Any, model: str) -> None:
    import anthropic

    error = catch_error(anthropic.BadRequestError, lambda: ask(client, model, temperature=9))
    assert_equal(error.body["error"]["type"], "invalid_request_error", "type")
    assert_equal(error.body["type"], "error", "form")
    catch_error(anthropic.NotFoundError, lambda: ask(client, "nobody"))
