"""A text does not depend on how it is requested: alone or batched, streamed, by HTTP or Python.

In float32, greedy or with a seed, whatever the sampling settings are.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from typing import Any

import pytest

from modelmill.core.types import SamplingParams
from modelmill.llm import LLM
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.routes.chat import chat_request_state
from tests.hypothesis_examples import examples
from tests.serve.service_thread import ServiceThread

PROMPTS = [
    "Once upon a time", "The little dog", "Tom and Lily went to the park. They", "One day, a",
    "She was sad because",
    "Mom said: \"No", "é", "In the big red box there was a",
]  # fmt: skip
MANY = 64
Found = list[tuple[str, list[int], str]]
RENAMED = {"include_stop_str_in_output": "include_stop"}


def random_settings(seed: int) -> dict[str, Any]:
    """A request's settings. The first few are greedy; every other has a seed of its own."""
    pick = random.Random(seed)
    options: dict[str, Any] = {"max_tokens": pick.choice([3, 17, 30, 48])}
    if seed % 6 == 0:
        options["temperature"] = 0
    else:
        options |= {
            "temperature": pick.choice([0.3, 0.8, 1.0, 1.7]),
            "seed": pick.randrange(2**40),
            "n": pick.choice([1, 1, 3]),
        }
    rare: dict[str, Any] = {
        "top_p": pick.choice([0.5, 0.9]), "top_k": pick.choice([1, 5, 40]),
        "min_p": pick.choice([0.05, 0.2]),
        "presence_penalty": pick.choice([-0.5, 1.5]), "frequency_penalty": pick.choice([-0.3, 1.2]),
        "repetition_penalty": pick.choice([0.8, 1.3]),
        "logit_bias": {str(pick.randrange(400, 500)): 4.0},
        "stop": pick.choice([["."], ["the", " a "], ["\n", "no such text"]]),
        "min_tokens": pick.choice([2, 12]),
        "ignore_eos": True, "logprobs": pick.choice([0, 2]), "include_stop_str_in_output": True,
        "stop_token_ids": pick.sample(range(400, 512), 12), "skip_special_tokens": False,
    }  # fmt: skip
    for name in pick.sample(sorted(rare), pick.choice([0, 0, 1, 2, 4, 8])):
        options[name] = rare[name]
    options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
    return options


SETTINGS = [(PROMPTS[seed % len(PROMPTS)], random_settings(seed)) for seed in range(MANY)]


def params(options: dict[str, Any]) -> SamplingParams:
    bias = {int(key): value for key, value in options.get("logit_bias", {}).items()}
    return SamplingParams(
        **{
            RENAMED.get(name, name): value
            for name, value in {**options, "logit_bias": bias}.items()
        }
    )


def found_in(answer: Any) -> Found:
    return [(output.text, output.token_ids, output.finish_reason) for output in answer.outputs]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Found]:
    """The class, one prompt after another."""
    return [
        found_in(llm.generate(prompt, params(options), progress=False)[0])
        for prompt, options in SETTINGS
    ]


async def unstreamed(running: ServiceThread, prompt: str, options: dict[str, Any]) -> Found:
    body = {"model": "stories", "prompt": prompt, "return_token_ids": True, **options}
    response = await running.client.post("/v1/completions", body)
    assert response.status == 200, response.body
    tables = [each["logprobs"] for each in response.json["choices"]]
    assert all((table is not None) == ("logprobs" in options) for table in tables)
    return [
        (each["text"], each["token_ids"], each["finish_reason"])
        for each in response.json["choices"]
    ]


async def streamed(running: ServiceThread, prompt: str, options: dict[str, Any]) -> Found:
    body = {
        "model": "stories",
        "prompt": prompt,
        "return_token_ids": True,
        "stream": True,
        **options,
    }
    response = await running.client.post("/v1/completions", body)
    assert response.status == 200, response.body
    texts, ids, ends = ([""] * options.get("n", 1) for _ in range(3))
    tokens: list[list[int]] = [[] for _ in ids]
    for event in response.events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["token_ids"]
            ends[choice["index"]] = choice["finish_reason"] or ""
    return list(zip(texts, tokens, ends, strict=True))


def test_the_settings_are_many() -> None:
    """Each in several of them, and with every other one at least once but for a few."""
    names = sorted({name for _, options in SETTINGS for name in options})
    assert len(names) == 18
    assert all(sum(name in options for _, options in SETTINGS) >= 5 for name in names)
    pairs = {pair for _, options in SETTINGS for pair in itertools.combinations(sorted(options), 2)}
    assert len(pairs) > 0.95 * math.comb(len(names), 2)
    assert sum(options["temperature"] == 0 for _, options in SETTINGS) == 11


def test_in_a_batch(llm: LLM, alone: list[Found]) -> None:
    prompts, options = zip(*SETTINGS, strict=True)
    answers = llm.generate(list(prompts), [params(each) for each in options], progress=False)
    assert [found_in(answer) for answer in answers] == alone


def test_seeds_matter(alone: list[Found]) -> None:
    """Otherwise all of this would say little."""
    assert len({str(output) for output in alone}) > 40


@pytest.mark.parametrize("ask", [unstreamed, streamed])
def test_over_http_one_after_another(running: ServiceThread, alone: list[Found], ask: Any) -> None:
    for (prompt, options), expected in zip(SETTINGS[::3], alone[::3], strict=True):
        assert running.run(ask(running, prompt, options)) == expected, options


def test_over_http_all_at_once(running: ServiceThread, alone: list[Found]) -> None:
    """Streamed and not, in an order of their own."""

    async def together() -> list[Found]:
        asks = [
            (unstreamed, streamed)[place % 2](running, *SETTINGS[place]) for place in range(MANY)
        ]
        return await asyncio.gather(*asks)

    for actual, expected, (_, options) in zip(
        running.run(together()), alone, SETTINGS, strict=True
    ):
        assert actual == expected, options


def test_a_list_of_prompts(running: ServiceThread, llm: LLM) -> None:
    body = {
        "model": "stories",
        "prompt": PROMPTS,
        "max_tokens": 20,
        "temperature": 0.9,
        "seed": 11,
        "n": 2,
    }
    choices = running.post("/v1/completions", body).json["choices"]
    options = SamplingParams(max_tokens=20, temperature=0.9, seed=11, n=2)
    expected = [
        output.text
        for prompt in PROMPTS
        for output in llm.generate(prompt, options, progress=False)[0].outputs
    ]
    assert [choice["text"] for choice in choices] == expected


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"temperature": 1.1, "seed": 5}, {"top_k": 8, "seed": 2**40}],
    ids=str,
)
def test_conversations(running: ServiceThread, llm: LLM, options: dict[str, Any]) -> None:
    talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    expected = [
        llm.chat(messages, SamplingParams(max_tokens=24, **options), progress=False)[0]
        .outputs[0]
        .text
        for messages in talks
    ]
    together = llm.chat(talks, SamplingParams(max_tokens=24, **options), progress=False)
    assert [answer.outputs[0].text for answer in together] == expected
    deltas = [llm.stream(messages, SamplingParams(max_tokens=24, **options)) for messages in talks]
    assert ["".join(delta.text for delta in each) for each in deltas] == expected

    async def ask(messages: Any, stream: bool) -> str:
        body = {
            "model": "stories",
            "messages": messages,
            "max_tokens": 24,
            "stream": stream,
            **options,
        }
        response = await running.client.post("/v1/chat/completions", body)
        if not stream:
            return str(response.json["choices"][0]["message"]["content"])
        return "".join(
            event["choices"][0]["delta"].get("content", "") for event in response.events[:-1]
        )

    async def all_of_them() -> list[str]:
        return await asyncio.gather(
            *(ask(messages, stream) for stream in (False, True) for messages in talks)
        )

    assert running.run(all_of_them()) == expected * 2


WEATHER = {
    "type": "function",
    "function": {
        "name": "sky",
        "parameters": {"type": "object", "properties": {"at": {"enum": ["Ulm", "Bonn"]}}},
    },
}
CASES: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": r"[A-Z][a-z]{2,5}, [0-9]{3}"}},
    {"structured_outputs": {"choice": ["yes", "no", "niño"]}},
    {"structured_outputs": {"grammar": 'start: ("a" | "b")+ "."'}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}},
        "required": ["n", "s"]}}}},
    {"tools": [WEATHER], "tool_choice": "required"},
    {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": True},
    {"tools": [WEATHER]},
    {"tools": [WEATHER], "tool_choice": "none"},
]  # fmt: skip
# these have no meaning with a grammar, or may leave it no end
LEFT = ("ignore_eos", "stop_token_ids")


def structured_body(place: int) -> dict[str, Any]:
    """A conversation's request: sampling settings of all kinds with each kind of structure."""
    options = {name: value for name, value in random_settings(place).items() if name not in LEFT}
    logprobs = (
        {"logprobs": True, "top_logprobs": options["logprobs"]} if "logprobs" in options else {}
    )
    messages = [{"role": "user", "content": PROMPTS[place % len(PROMPTS)]}]
    return {
        **options,
        **logprobs,
        **CASES[place % len(CASES)],
        "model": "stories",
        "messages": messages,
        "max_tokens": 120,
    }


def comparable(choice: dict[str, Any], message: dict[str, Any]) -> tuple[Any, ...]:
    """Of a choice what has to be the same: ids of calls are drawn anew each time."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return message.get("content") or "", calls, choice["token_ids"], choice["finish_reason"]


async def run_chat(running: ServiceThread, body: dict[str, Any], stream: bool) -> list[Any]:
    response = await running.client.post(
        "/v1/chat/completions", {**body, "stream": stream, "return_token_ids": True}
    )
    assert response.status == 200, response.body
    if not stream:
        return [comparable(choice, choice["message"]) for choice in response.json["choices"]]
    assert response.events[0]["prompt_token_ids"]
    choices: list[Any] = [
        ({"token_ids": []}, {"content": "", "tool_calls": []}) for _ in range(body.get("n", 1))
    ]
    for event in response.events[:-1]:
        for piece in event["choices"]:
            choice, message = choices[piece["index"]]
            choice["token_ids"] += piece.get("token_ids", ())
            choice["finish_reason"] = piece["finish_reason"]
            message["content"] += piece["delta"].get("content", "")
            for call in piece["delta"].get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(
                        {"function": {"name": call["function"]["name"], "arguments": ""}}
                    )
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"][
                    "arguments"
                ]
    return [comparable(*each) for each in choices]


def test_answers_that_are_held_to_something(
    running: ServiceThread, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Structured output, tools and forced calls: alone, all at once, streamed and from the
    class.
    """
    # the engine reads 512 tokens, a letter each
    monkeypatch.setattr("modelmill.text.tool_prompts.TOOLS_SYSTEM_PROMPT", "{tools}")
    rounds = examples(full=3, quick=1)
    bodies = [structured_body(place) for place in range(rounds * len(CASES))]
    alone = [running.run(run_chat(running, body, False)) for body in bodies]

    async def together() -> list[Any]:
        return await asyncio.gather(
            *(run_chat(running, body, stream) for stream in (True, False) for body in bodies)
        )

    assert running.run(together()) == alone * 2
    dialogues = [
        chat_request_state(llm.language, ChatRequest.model_validate(body), 512) for body in bodies
    ]
    answers = llm._run_requests(dialogues, False)
    assert [[output.token_ids for output in answer.outputs] for answer in answers] == [
        [ids for _, _, ids, _ in choices] for choices in alone
    ]
    assert sum(bool(calls) for choices in alone for _, calls, _, _ in choices) >= 2.5 * rounds
