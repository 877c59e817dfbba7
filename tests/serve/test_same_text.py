"""A text does not depend on how it is asked for: alone or in a batch, streamed or not, over HTTP or from Python.

In float32, greedy or with a seed, whatever the sampling settings are.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from modelmill.core.types import SamplingParams
from modelmill.llm import LLM
from tests.serve.running import Running

PROMPTS = [
    "Once upon a time", "The little dog", "Tom and Lily went to the park. They", "One day, a", "She was sad because",
    "Mom said: \"No", "é", "In the big red box there was a",
]  # fmt: skip
MANY = 48
Found = list[tuple[str, list[int], str]]


def drawn(seed: int) -> dict[str, Any]:
    """A request's settings. The first few are greedy; every other has a seed of its own."""
    pick = random.Random(seed)
    how: dict[str, Any] = {"max_tokens": pick.choice([3, 17, 30, 48])}
    if seed % 6 == 0:
        how["temperature"] = 0
    else:
        how |= {
            "temperature": pick.choice([0.3, 0.8, 1.0, 1.7]),
            "seed": pick.randrange(2**40),
            "n": pick.choice([1, 1, 3]),
        }
    rare: dict[str, Any] = {
        "top_p": pick.choice([0.5, 0.9]), "top_k": pick.choice([1, 5, 40]), "min_p": pick.choice([0.05, 0.2]),
        "presence_penalty": pick.choice([-0.5, 1.5]), "frequency_penalty": pick.choice([-0.3, 1.2]),
        "repetition_penalty": pick.choice([0.8, 1.3]), "logit_bias": {str(pick.randrange(400, 500)): 4.0},
        "stop": pick.choice([["."], ["the", " a "], ["\n", "no such text"]]), "min_tokens": pick.choice([2, 12]),
        "ignore_eos": True, "logprobs": pick.choice([0, 2]),
    }  # fmt: skip
    for name in pick.sample(sorted(rare), pick.choice([0, 0, 1, 2, 4])):
        how[name] = rare[name]
    how["min_tokens"] = min(how.get("min_tokens", 0), how["max_tokens"])
    return how


SETTINGS = [(PROMPTS[seed % len(PROMPTS)], drawn(seed)) for seed in range(MANY)]


def params(how: dict[str, Any]) -> SamplingParams:
    bias = {int(key): value for key, value in how.get("logit_bias", {}).items()}
    return SamplingParams(**{**how, "logit_bias": bias})


def of(answer: Any) -> Found:
    return [(output.text, output.token_ids, output.finish_reason) for output in answer.outputs]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Found]:
    """The class, one prompt after another."""
    return [of(llm.generate(prompt, params(how), progress=False)[0]) for prompt, how in SETTINGS]


async def whole(running: Running, prompt: str, how: dict[str, Any]) -> Found:
    body = {"model": "stories", "prompt": prompt, "return_token_ids": True, **how}
    response = await running.client.post("/v1/completions", body)
    assert response.status == 200, response.body
    return [(each["text"], each["token_ids"], each["finish_reason"]) for each in response.json["choices"]]


async def streamed(running: Running, prompt: str, how: dict[str, Any]) -> Found:
    body = {"model": "stories", "prompt": prompt, "return_token_ids": True, "stream": True, **how}
    response = await running.client.post("/v1/completions", body)
    assert response.status == 200, response.body
    texts, ids, ends = ([""] * how.get("n", 1) for _ in range(3))
    tokens: list[list[int]] = [[] for _ in ids]
    for event in response.events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["token_ids"]
            ends[choice["index"]] = choice["finish_reason"] or ""
    return list(zip(texts, tokens, ends, strict=True))


def plain(found: Found) -> list[tuple[str, str]]:
    return [(text, end) for text, _, end in found]


def test_the_settings_are_many() -> None:
    names = {name for _, how in SETTINGS for name in how}
    assert len(names) == 15
    assert sum(how["temperature"] == 0 for _, how in SETTINGS) == 8


def test_in_a_batch(llm: LLM, alone: list[Found]) -> None:
    prompts, how = zip(*SETTINGS, strict=True)
    answers = llm.generate(list(prompts), [params(each) for each in how], progress=False)
    assert [of(answer) for answer in answers] == alone


def test_seeds_matter(alone: list[Found]) -> None:
    """Otherwise all of this would say little."""
    assert len({str(found) for found in alone}) > 40


@pytest.mark.parametrize("ask", [whole, streamed])
def test_over_http_one_after_another(running: Running, alone: list[Found], ask: Any) -> None:
    for (prompt, how), expected in zip(SETTINGS[::3], alone[::3], strict=True):
        found = running.do(ask(running, prompt, how))
        assert plain(found) == plain(expected), how
        if ask is whole:
            assert found == expected


def test_over_http_all_at_once(running: Running, alone: list[Found]) -> None:
    """Streamed and not, in an order of their own."""

    async def together() -> list[Found]:
        asks = [(whole, streamed)[place % 2](running, *SETTINGS[place]) for place in range(MANY)]
        return await asyncio.gather(*asks)

    for found, expected, (_, how) in zip(running.do(together()), alone, SETTINGS, strict=True):
        assert plain(found) == plain(expected), how


def test_a_list_of_prompts(running: Running, llm: LLM) -> None:
    body = {"model": "stories", "prompt": PROMPTS, "max_tokens": 20, "temperature": 0.9, "seed": 11, "n": 2}
    choices = running.post("/v1/completions", body).json["choices"]
    how = SamplingParams(max_tokens=20, temperature=0.9, seed=11, n=2)
    expected = [output.text for prompt in PROMPTS for output in llm.generate(prompt, how, progress=False)[0].outputs]
    assert [choice["text"] for choice in choices] == expected


@pytest.mark.parametrize(
    "how", [{"temperature": 0}, {"temperature": 1.1, "seed": 5}, {"top_k": 8, "seed": 2**40}], ids=str
)
def test_conversations(running: Running, llm: LLM, how: dict[str, Any]) -> None:
    talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    expected = [
        llm.chat(talk, SamplingParams(max_tokens=24, **how), progress=False)[0].outputs[0].text for talk in talks
    ]
    together = llm.chat(talks, SamplingParams(max_tokens=24, **how), progress=False)
    assert [answer.outputs[0].text for answer in together] == expected
    deltas = [llm.stream(talk, SamplingParams(max_tokens=24, **how)) for talk in talks]
    assert ["".join(delta.text for delta in each) for each in deltas] == expected

    async def ask(talk: Any, stream: bool) -> str:
        body = {"model": "stories", "messages": talk, "max_tokens": 24, "stream": stream, **how}
        response = await running.client.post("/v1/chat/completions", body)
        if not stream:
            return str(response.json["choices"][0]["message"]["content"])
        return "".join(event["choices"][0]["delta"].get("content", "") for event in response.events[:-1])

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(ask(talk, stream) for stream in (False, True) for talk in talks))

    assert running.do(all_of_them()) == expected * 2
