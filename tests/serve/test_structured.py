"""Answers that keep to a grammar, over the API: whatever a model of 260 thousand parameters would
rather say.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from modelmill.core.types import SamplingParams
from modelmill.llm import LLM
from tests.serve.service_thread import ServiceThread
from tests.wait import time_limit, wait_until

TALK = [{"role": "user", "content": "Tell me"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def texts_of(running: ServiceThread, **body: Any) -> list[str]:
    """What every choice says, whole and streamed, which must be the same."""
    ask = {"model": "stories", "messages": TALK, "max_tokens": 200, "temperature": 0, **body}
    response = running.post("/v1/chat/completions", ask)
    assert response.status == 200, response.body
    texts = [choice["message"]["content"] for choice in response.json["choices"]]
    assert all(choice["finish_reason"] == "stop" for choice in response.json["choices"]), texts
    streamed = [""] * len(texts)
    for event in running.post("/v1/chat/completions", {**ask, "stream": True}).events[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts
    return texts


def schema(value: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": value, "strict": True},
        }
    }


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.5, "seed": 3, "n": 4}, {"logprobs": True}], ids=str
)
def test_a_json_schema(running: ServiceThread, options: Any) -> None:
    for text in texts_of(running, **schema(PERSON), **options):
        value = json.loads(text)
        assert value.keys() == {"name", "age"}
        assert len(value["name"]) <= 8
        assert 0 <= value["age"] <= 99


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.2, "seed": 5, "n": 3, "repetition_penalty": 1.2}], ids=str
)
def test_patterns_and_choices(running: ServiceThread, options: Any) -> None:
    for text in texts_of(
        running, structured_outputs={"regex": r"[A-Z][a-z]{2,5}, [0-9]{3}"}, **options
    ):
        assert re.fullmatch(r"[A-Z][a-z]{2,5}, [0-9]{3}", text)
    for text in texts_of(
        running, structured_outputs={"choice": ["yes", "no", 'may"be', "niño"]}, **options
    ):
        assert text in ("yes", "no", 'may"be', "niño")
    for text in texts_of(
        running,
        structured_outputs={"grammar": 'start: "a"+ "b"\n'},
        logit_bias={"404": 1.0},
        **options,
    ):
        assert re.fullmatch("a+b", text)


@pytest.mark.parametrize(
    "options", [{"choice": [" yes", " no"]}, {"regex": " (yes|no)"}, {"regex": " ?a "}], ids=str
)
def test_a_space_that_the_grammar_asks_for_is_said(running: ServiceThread, options: Any) -> None:
    """SentencePiece drops the space before a text of its own; an answer that a grammar counts has
    all its bytes.
    """
    for text in texts_of(running, structured_outputs=options):
        assert re.fullmatch(options.get("regex", " yes| no"), text)
    for prompt in ([1], "x"):  # the token that every text begins with, alone
        ask = {
            "model": "stories",
            "prompt": prompt,
            "max_tokens": 30,
            "temperature": 0,
            "structured_outputs": options,
        }
        for more in ({}, {"logprobs": 0, "echo": True}):
            (choice,) = running.post("/v1/completions", {**ask, **more}).json["choices"]
            text = choice["text"].removeprefix("x")
            assert re.fullmatch(options.get("regex", " yes| no"), text)
        table, own = choice["logprobs"], len(choice["text"]) - len(text)
        ends = [*table["text_offset"][1:], len(choice["text"])]
        places = zip(table["text_offset"], ends, table["tokens"], strict=True)
        answer = [
            (token, choice["text"][begin:end]) for begin, end, token in places if begin >= own
        ]
        assert all(token in ("<s>", "</s>", piece) for token, piece in answer), choice


def test_some_object(running: ServiceThread) -> None:
    body = {
        "model": "stories",
        "messages": TALK,
        "max_tokens": 60,
        "response_format": {"type": "json_object"},
        "seed": 1,
    }
    choice = running.post("/v1/chat/completions", body).json["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_neighbours_of_a_guided_answer_are_not_touched(running: ServiceThread, llm: LLM) -> None:
    import asyncio

    plain = {"model": "stories", "messages": TALK, "max_tokens": 40, "temperature": 0}
    expected = (
        llm.chat(TALK, SamplingParams(temperature=0, max_tokens=40), progress=False)[0]
        .outputs[0]
        .text
    )

    async def together() -> list[Any]:
        bodies = [plain, {**plain, **schema(PERSON), "max_tokens": 200}] * 6
        return await asyncio.gather(
            *(running.client.post("/v1/chat/completions", body) for body in bodies)
        )

    answers = [
        response.json["choices"][0]["message"]["content"] for response in running.run(together())
    ]
    assert answers[::2] == [expected] * 6
    assert len(set(answers[1::2])) == 1
    json.loads(answers[1])


def test_completions_too(running: ServiceThread) -> None:
    body = {
        "model": "stories",
        "prompt": ["The dog is", "The cat"],
        "max_tokens": 30,
        "min_tokens": 9,
        "temperature": 0,
    }
    answers = running.post(
        "/v1/completions", {**body, "structured_outputs": {"choice": ["big", "small"]}}
    ).json
    assert all(choice["text"] in ("big", "small") for choice in answers["choices"])


DEEP: Any = {"type": "string"}
for _ in range(100):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    "ask",
    [
        {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}},
        schema({"type": "wrong"}),
        {"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}},
        schema(DEEP), schema([]),
        schema({"$ref": "#/nowhere"}), schema({"$ref": "http://169.254.169.254/"}),
        schema({"$ref": "#"}),
        schema({"type": "object", "properties": {str(i): {"enum": ["x" * 100]} for i in range(10**4)}}),  # noqa: E501
        schema({"type": "string", "pattern": "("}), schema({"type": "string", "minLength": 10**9}),
        *({"structured_outputs": value} for value in (
            {}, {"regex": "("}, {"regex": "(a{1,9999}){1,9999}"}, {"regex": "(?=a)b"},
            {"regex": "a", "choice": ["b"]},
            {"choice": []}, {"choice": [""]}, {"choice": ["a", "\ud800"]}, {"choice": ["x"] * 5000},
            {"grammar": "nope"},
            {"grammar": "start: start"},
            {"regex": "x" * 10**6}, {"json": "{"}, {"json": "[" * 5000}, {"evil": 1},
            {"regex": "((((a*)*)*)*)*" * 300},
        )),
        {**schema(PERSON), "structured_outputs": {"regex": "a"}},
        {**schema(PERSON), "ignore_eos": True},
    ],
    ids=range(30),
)  # fmt: skip
def test_what_is_no_grammar_is_refused_soon(running: ServiceThread, ask: Any) -> None:
    """400, or an answer; within seconds, by the same worker."""
    pid = running.engine.pid
    body = {"model": "stories", "messages": TALK, "max_tokens": 8, **ask}
    with time_limit():
        response = running.post("/v1/chat/completions", body)
    assert response.status in (200, 400), response.body
    if response.status == 400:
        assert len(response.json["error"]["message"]) < 600
    assert running.engine.pid == pid
    assert running.post("/v1/chat/completions", {**body, **dict.fromkeys(ask)}).status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "ask",
    [
        schema({"$ref": "#"}),
        schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        {"structured_outputs": {"regex": r"[^\s\S]"}},
        {"structured_outputs": {"grammar": "start: start"}},
    ],
    ids=range(4),
)
def test_what_no_text_fits_is_a_400_in_streams_too(
    running: ServiceThread, ask: Any, stream: bool
) -> None:
    body = {"model": "stories", "messages": TALK, "max_tokens": 8, "stream": stream, **ask}
    response = running.post("/v1/chat/completions", body)
    assert response.status == 400
    assert "cannot be used" in response.json["error"]["message"]


def test_leaving_while_a_grammar_is_made(running: ServiceThread) -> None:
    """Closed before, while or after it: nothing is left."""
    import asyncio
    from contextlib import aclosing

    async def leave(place: int) -> None:
        ask = {
            "model": "stories",
            "messages": TALK,
            "max_tokens": 100,
            "stream": True,
            **schema(PERSON),
        }
        async with aclosing(running.client.parts("POST", "/v1/chat/completions", ask)) as parts:  # type: ignore[type-var]
            async for part_type, _ in parts:
                if part_type == "body":
                    await asyncio.sleep(0.0005 * (place % 7))
                    return

    async def many() -> None:
        await asyncio.gather(*(leave(place) for place in range(60)))

    running.run(many())

    def empty() -> bool:
        stats = running.run(running.engine.stats())
        return stats is not None and (stats.running, stats.waiting, stats.free_pages) == (
            0,
            0,
            stats.pages,
        )

    wait_until(empty, describe=lambda: running.run(running.engine.stats()))


def test_an_answer_whose_grammar_takes_too_much_work_is_an_error_and_not_whole(
    running: ServiceThread,
) -> None:
    """Streamed as well; and one whose schema has no text is refused."""
    pattern = {"type": "string", "pattern": "^(.{1,80} ){1,50}$"}
    response_format = schema(
        {
            "type": "object",
            "properties": {"a": pattern},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
    body = {
        "model": "stories",
        "messages": [{"role": "user", "content": "Go on"}],
        "max_tokens": 400,
        **response_format,
    }
    for seed in range(3):
        body_with_seed = {**body, "temperature": 1.0, "seed": seed}
        response = running.post("/v1/chat/completions", body_with_seed)
        assert response.status == 400, response.json["choices"][0]
        assert "held to its grammar" in response.json["error"]["message"]
        streamed = running.post("/v1/chat/completions", {**body_with_seed, "stream": True})
        assert b"held to its grammar" in streamed.body
        assert b'"finish_reason":"stop"' not in streamed.body
    for nothing in ({"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}):
        refused = running.post("/v1/chat/completions", {**body, **schema(nothing)})
        assert (refused.status, "cannot be used" in refused.json["error"]["message"]) == (400, True)
