"""The routes, over the real worker of a tiny engine, without a socket."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from modelmill.core.errors import MissingDependency
from modelmill.core.types import SamplingParams
from modelmill.llm import LLM
from modelmill.serve import json_logs
from modelmill.serve.dialects.error_format import LLAMA_CPP_PATHS
from modelmill.serve.engine_client import max_tokenize_tokens
from tests.serve.service_thread import ServiceThread

PROMPTS = [
    "Once upon a time",
    "The little dog",
    "Lily went to the",
    "One day, Tom saw a big",
    "It was raining",
]
START = "Once upon"
GREEDY = {"temperature": 0, "max_tokens": 24}
TALK = [{"role": "user", "content": "Tell me a story"}]


def complete(running: ServiceThread, **body: Any) -> Any:
    response = running.post("/v1/completions", {"model": "stories", **GREEDY, **body})
    assert response.status == 200, response.body
    return response.events if body.get("stream") else response.json


def chat(running: ServiceThread, **body: Any) -> Any:
    response = running.post(
        "/v1/chat/completions", {"model": "stories", "messages": TALK, **GREEDY, **body}
    )
    assert response.status == 200, response.body
    return response.events if body.get("stream") else response.json


def texts_of(events: list[Any], count: int) -> list[str]:
    """What a stream of completions says, by choice; checks the shape of every event."""
    assert events[-1] == "[DONE]"
    texts, ended = [""] * count, [False] * count
    for event in events[:-1]:
        for choice in event["choices"]:
            assert not ended[choice["index"]], "a chunk after the last"
            texts[choice["index"]] += (
                choice["text"] if "text" in choice else choice["delta"].get("content", "")
            )
            ended[choice["index"]] = choice["finish_reason"] is not None
    assert all(ended)
    assert len({event["id"] for event in events[:-1]}) == 1
    return texts


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "seed": 3, "n": 3}],
    ids=str,
)
def test_text_is_the_same_alone_batched_streamed_and_in_the_class(
    running: ServiceThread, llm: LLM, options: Any
) -> None:
    params = SamplingParams(**{**GREEDY, **options})
    expected = [
        output.text
        for answer in llm.generate(PROMPTS, params, progress=False)
        for output in answer.outputs
    ]
    n = options.get("n", 1)
    batched = complete(running, prompt=PROMPTS, **options)
    assert [choice["text"] for choice in batched["choices"]] == expected
    assert [choice["index"] for choice in batched["choices"]] == list(range(n * len(PROMPTS)))
    alone = [complete(running, prompt=prompt, **options) for prompt in PROMPTS]
    assert [choice["text"] for each in alone for choice in each["choices"]] == expected
    assert (
        texts_of(complete(running, prompt=PROMPTS, stream=True, **options), n * len(PROMPTS))
        == expected
    )
    ids = [llm.language.encode_prompt(prompt) for prompt in PROMPTS]
    assert [
        choice["text"] for choice in complete(running, prompt=ids, **options)["choices"]
    ] == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 7, "n": 2}], ids=str)
def test_conversations_too(running: ServiceThread, llm: LLM, options: Any) -> None:
    (answer,) = llm.chat(TALK, SamplingParams(**{**GREEDY, **options}), progress=False)
    expected = [output.text for output in answer.outputs]
    response = chat(running, **options)
    assert [choice["message"]["content"] for choice in response["choices"]] == expected
    events = chat(running, stream=True, **options)
    assert texts_of(events, len(expected)) == expected
    assert [event["choices"][0]["delta"].get("role") for event in events[: len(expected)]] == [
        "assistant"
    ] * len(expected)


def test_the_shape_of_a_chat_answer(running: ServiceThread) -> None:
    reply = chat(running)
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", reply["id"])
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "stories"
    (choice,) = reply["choices"]
    assert choice["logprobs"] is None
    assert choice["message"]["refusal"] is None
    assert choice["finish_reason"] == "length"
    usage = reply["usage"]
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24


def test_usage_ends_a_stream_where_it_is_asked_for(running: ServiceThread) -> None:
    for ask in (complete, chat):
        more = {"prompt": PROMPTS[0]} if ask is complete else {}
        plain = ask(running, stream=True, **more)
        assert all("usage" not in event for event in plain[:-1])
        events = ask(running, stream=True, stream_options={"include_usage": True}, **more)
        assert all(event["usage"] is None for event in events[:-2])
        assert events[-2]["choices"] == []
        assert events[-2]["usage"] == ask(running, **more)["usage"] | {
            "prompt_tokens_details": events[-2]["usage"]["prompt_tokens_details"]
        }


def test_stop_strings_end_the_text_and_never_show(running: ServiceThread) -> None:
    full_text = complete(running, prompt=PROMPTS[0], max_tokens=60)["choices"][0]["text"]
    stop = full_text[30:34]
    cut = full_text[: full_text.index(stop)]
    (choice,) = complete(
        running, prompt=PROMPTS[0], max_tokens=60, stop=[stop, "never to be seen"]
    )["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
    events = complete(running, prompt=PROMPTS[0], max_tokens=60, stop=stop, stream=True)
    assert texts_of(events, 1) == [cut]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("tools", [False, True])
def test_of_several_answers_each_ends_once_at_a_stop_string(
    running: ServiceThread, tools: bool
) -> None:
    """The worker continues such a sequence until it receives FinishSequence; its tokens until then
    are not streamed.
    """
    named = {"tools": [{"type": "function", "function": {"name": "now"}}]} if tools else {}
    options = {"n": 4, "temperature": 1.0, "seed": 5, "max_tokens": 60, "stop": [".", "a"]}
    for ask, more in ((complete, {"prompt": PROMPTS[0]}), (chat, named)):
        choices = ask(running, **options, **more)["choices"]
        texts = [
            choice["text"] if "text" in choice else choice["message"]["content"]
            for choice in choices
        ]
        assert "stop" in {choice["finish_reason"] for choice in choices}
        # texts_of refuses a chunk after the last
        assert texts_of(ask(running, **options, **more, stream=True), 4) == texts


def test_logprobs_of_a_completion_with_echo(running: ServiceThread, llm: LLM) -> None:
    """As used for scoring: logprobs of the prompt's tokens and new ones, with text offsets."""
    (choice,) = complete(running, prompt=START, echo=True, logprobs=3, max_tokens=4)["choices"]
    table = choice["logprobs"]
    assert choice["text"].startswith(START + " ")
    (answer,) = llm.generate(
        [START],
        SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=3),
        progress=False,
    )
    entries = [*(answer.prompt_logprobs or []), *(answer.outputs[0].logprobs or [])]
    ids = [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
    assert table["token_logprobs"] == [
        None if e is None else e[id].logprob for id, e in zip(ids, entries)
    ]
    assert table["token_logprobs"][0] is None
    assert [len(best) for best in table["top_logprobs"][1:]] == [
        3 + (e[i].rank > 3) for i, e in zip(ids[1:], entries[1:])
    ]
    for token, offset in zip(table["tokens"][2:], table["text_offset"][2:]):
        assert choice["text"][offset : offset + len(token)] == token
    events = complete(running, prompt=START, echo=True, logprobs=3, max_tokens=4, stream=True)
    parts = [
        event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"][0]["logprobs"]
    ]
    assert {key: [v for part in parts for v in part[key]] for key in table} == table
    assert texts_of(events, 1) == [choice["text"]]


def test_a_completion_goes_on_with_the_text(running: ServiceThread, llm: LLM) -> None:
    """SentencePiece drops the first space of a text, but an answer to a prompt of words begins no
    text.
    """
    ids = llm.tokenizer.encode(START)
    for prompt in (START, ids):
        (completion,) = complete(running, prompt=prompt, max_tokens=8, logprobs=1)["choices"]
        (echoed,) = complete(running, prompt=prompt, max_tokens=8, echo=True)["choices"]
        assert completion["text"].startswith(" ")
        assert echoed["text"] == START + completion["text"]
        table = completion["logprobs"]
        for token, offset in zip(table["tokens"], table["text_offset"]):
            assert completion["text"][offset : offset + len(token)] == token
    (answer,) = llm.generate([START], SamplingParams(temperature=0, max_tokens=8), progress=False)
    assert START + answer.outputs[0].text == llm.tokenizer.decode(
        [*ids, *answer.outputs[0].token_ids]
    )
    # nothing but the token that every text begins with: the answer is a text of its own
    (alone,) = complete(running, prompt=ids[:1], max_tokens=8)["choices"]
    assert alone["text"] == alone["text"].lstrip()


def test_scoring_alone_writes_nothing(running: ServiceThread) -> None:
    reply = complete(running, prompt=[[1, 403, 407, 261]], echo=True, logprobs=1, max_tokens=0)
    (choice,) = reply["choices"]
    assert choice["logprobs"]["tokens"] == ["<s>", " Once", " upon", " a"]
    assert len(choice["logprobs"]["token_logprobs"]) == 4
    assert choice["text"] == "Once upon a"
    assert reply["usage"]["completion_tokens"] == 0


def test_logprobs_of_a_conversation(running: ServiceThread) -> None:
    (choice,) = chat(running, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert (
        b"".join(bytes(each["bytes"]) for each in content).decode().strip()
        == choice["message"]["content"].strip()
    )
    assert all(len(each["top_logprobs"]) == 2 for each in content)
    assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] <= 0 for each in content)
    events = chat(running, logprobs=True, top_logprobs=2, stream=True)
    tokens = [
        e["choices"][0]["logprobs"]["content"] for e in events[:-1] if e["choices"][0]["logprobs"]
    ]
    assert [each for part in tokens for each in part] == content


def test_ids_in_and_out(running: ServiceThread, llm: LLM) -> None:
    (choice,) = complete(running, prompt=PROMPTS[0], return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == llm.language.encode_prompt(PROMPTS[0])
    assert len(choice["token_ids"]) == 24
    events = complete(running, prompt=PROMPTS[0], return_token_ids=True, stream=True)
    assert [id for event in events[:-1] for id in event["choices"][0]["token_ids"]] == choice[
        "token_ids"
    ]
    assert (
        running.post("/detokenize", {"tokens": choice["token_ids"]}).json["prompt"].strip()
        == choice["text"].strip()
    )


def test_extras_reach_the_engine(running: ServiceThread, llm: LLM) -> None:
    extras = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.3,
        "logit_bias": {"403": -50.0},
        "min_tokens": 3,
    }
    params = SamplingParams(
        max_tokens=24, temperature=0.9, seed=1, **{**extras, "logit_bias": {403: -50.0}}
    )
    expected = llm.generate([PROMPTS[1]], params, progress=False)[0].outputs[0].text
    assert (
        complete(running, prompt=PROMPTS[1], temperature=0.9, seed=1, **extras)["choices"][0][
            "text"
        ]
        == expected
    )


def test_a_client_that_says_nothing_gets_openais_defaults(running: ServiceThread, llm: LLM) -> None:
    """Of an engine whose checkpoint says nothing; as if temperature 1 and top_p 1 had been sent."""
    for seed in range(3):
        reply = complete(running, prompt=PROMPTS[1], seed=seed, temperature=1.0, top_p=1.0)[
            "choices"
        ][0]["text"]
        assert (
            complete(running, prompt=PROMPTS[1], seed=seed, temperature=None)["choices"][0]["text"]
            == reply
        )
    own = (
        llm.generate([PROMPTS[1]], SamplingParams(max_tokens=24, seed=2), progress=False)[0]
        .outputs[0]
        .text
    )
    assert own != reply


def test_models_tokenize_version_health(running: ServiceThread, llm: LLM) -> None:
    assert [each["id"] for each in running.get("/v1/models").json["data"]] == ["stories", "alias"]
    assert running.get("/v1/models/alias").json["max_model_len"] == 512
    assert running.get("/v1/models/other").status == 404
    card = running.get("/v1/models/alias").json
    # the checkpoint says nothing: OpenAI's defaults for clients, ours for the page
    assert card["default_sampling"]["values"] == {"temperature": 1.0, "top_p": 1.0}
    assert card["suggested_sampling"]["values"] == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.05,
    }
    assert card["suggested_sampling"]["source"] == "modelmill"
    ids = running.post("/tokenize", {"prompt": PROMPTS[0]}).json["tokens"]
    assert ids == llm.language.encode_prompt(PROMPTS[0])
    assert (
        running.post("/tokenize", {"prompt": PROMPTS[0], "add_special_tokens": False}).json[
            "tokens"
        ]
        == ids[1:]
    )
    tokenized = running.post("/tokenize", {"messages": TALK}).json
    assert tokenized["count"] == chat(running)["usage"]["prompt_tokens"]
    assert running.get("/version").json.keys() == {"version"}
    health = running.get("/health")
    assert (health.status, health.json["status"]) == (200, "ok")


def test_metrics_count_what_was_done(running: ServiceThread) -> None:
    def read_metrics() -> dict[str, float]:
        page = running.get("/metrics").body.decode()
        lines = [
            line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")
        ]
        return {name: float(value) for name, value in lines}

    complete(running, prompt=PROMPTS[0])
    before = read_metrics()
    complete(running, prompt=PROMPTS[:2], n=2)
    after = read_metrics()
    label = '{model_name="stories"}'

    def grown(name: str) -> float:
        return after[f"modelmill:{name}"] - before[f"modelmill:{name}"]

    assert grown(f"generation_tokens_total{label}") == 4 * 24
    assert grown('request_success_total{finished_reason="length",model_name="stories"}') == 4
    assert grown(f"time_to_first_token_seconds_count{label}") == 2
    assert grown(f"e2e_request_latency_seconds_count{label}") == 2
    assert grown(f"request_queue_time_seconds_count{label}") == 2
    assert grown(f"inter_token_latency_seconds_count{label}") == 4 * 23
    assert grown(f"prefix_cache_queries_total{label}") > 0
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"modelmill:{gauge}{label}"] == 0
    assert f"modelmill:num_preemptions_total{label}" in after
    assert f"modelmill:prefix_cache_hits_total{label}" in after


def test_every_answer_carries_its_request_id(running: ServiceThread) -> None:
    response = running.get("/version", headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    made = running.get("/nothing", headers={"x-request-id": "bad\x01" * 100})
    assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])


def test_the_openapi_document_tells_what_is_answered(running: ServiceThread) -> None:
    document = running.get("/openapi.json").json
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/health",
        "/metrics",
        "/tokenize",
    } <= set(document["paths"])
    for path, operations in document["paths"].items():
        dialect = "Ollama" if path.startswith("/api/") else "Anthropic" * ("/messages" in path)
        dialect = "LlamaCpp" if path in LLAMA_CPP_PATHS else dialect
        for operation in operations.values():
            assert "422" not in operation["responses"]
            content = operation["responses"]["400"]["content"]["application/json"]["schema"]
            assert content == {"$ref": f"#/components/schemas/{dialect}ErrorResponse"}
    assert not document["components"]["schemas"]["ChatRequest"]["additionalProperties"]


def test_scoring_counts_on_the_token_that_was_drawn_even_where_it_ends_the_text(
    running: ServiceThread,
) -> None:
    """lm-eval leaves out the last entry: without this one it would lose a token of the text that it
    scores.
    """
    body = {
        "model": "stories",
        "prompt": "Once",
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
    }
    choice = running.post("/v1/completions", {**body, "logit_bias": {"2": 100}}).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    known = running.post("/tokenize", {"model": "stories", "prompt": "Once"}).json["tokens"]
    assert len(choice["logprobs"]["token_logprobs"]) == len(known) + 1


def of_stream(events: list[Any]) -> tuple[str, dict[str, list[Any]]]:
    """(text, table of logprobs) of a stream of one completion."""
    tables = [
        event["choices"][0]["logprobs"] for event in events[:-1] if event["choices"][0]["logprobs"]
    ]
    return texts_of(events, 1)[0], {
        key: [value for table in tables for value in table[key]] for key in tables[0]
    }


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_tells_the_token_that_ended_it_where_the_whole_answer_does(
    running: ServiceThread, echo: bool
) -> None:
    ids = complete(running, prompt=PROMPTS[0], return_token_ids=True)["choices"][0]["token_ids"]
    options = {"prompt": PROMPTS[0], "logprobs": 0, "echo": echo, "stop_token_ids": [ids[5]]}
    (choice,) = complete(running, **options)["choices"]
    prompt = len(
        running.post("/tokenize", {"model": "stories", "prompt": PROMPTS[0]}).json["tokens"]
    )
    assert len(choice["logprobs"]["tokens"]) == (prompt + 6 if echo else 5)
    assert of_stream(complete(running, **options, stream=True)) == (
        choice["text"],
        choice["logprobs"],
    )


@pytest.mark.parametrize("prompt", ["Once", [1, 403]])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_count_the_control_tokens_that_are_shown(
    running: ServiceThread, echo: bool, prompt: Any
) -> None:
    options = {
        "prompt": prompt,
        "logprobs": 0,
        "echo": echo,
        "max_tokens": 4,
        "logit_bias": {"0": 100},
    }
    (shown,) = complete(running, **options, skip_special_tokens=False)["choices"]
    size = len("Once") if echo else 0
    assert shown["text"][size:] == "<unk>" * 4
    assert shown["logprobs"]["text_offset"][-4:] == [size + 5 * i for i in range(4)]
    (hidden,) = complete(running, **options)["choices"]
    assert (hidden["text"][size:], hidden["logprobs"]["text_offset"][-4:]) == ("", [size] * 4)


@pytest.mark.parametrize(
    ("bias", "most", "shown", "answer"),
    [
        ({"172": 100}, 2, "é\ufffd", "\ufffd\ufffd"),
        ({"403": 100}, 1, "\ufffd Once", " Once"),
        ({"2": 100}, 5, "\ufffd", ""),
        ({}, 0, "\ufffd", ""),
    ],
    ids=["finished", "left unfinished", "ended", "no answer"],
)
def test_a_prompt_that_ends_inside_a_character(
    running: ServiceThread, bias: Any, most: int, shown: str, answer: str
) -> None:
    """What is shown is what its ids and the answer's are together: é is 198 and 172, 403 " Once", 2
    the end.
    """
    options = {"prompt": [1, 403, 198], "logprobs": 0, "logit_bias": bias, "max_tokens": most}
    (choice,) = complete(running, **options, echo=True)["choices"]
    assert choice["text"] == "Once" + shown
    assert choice["logprobs"]["text_offset"][:3] == [0, 0, 4]
    assert of_stream(complete(running, **options, echo=True, stream=True)) == (
        choice["text"],
        choice["logprobs"],
    )
    assert complete(running, **options)["choices"][0]["text"] == answer


@pytest.mark.parametrize("size", [600, 60_000])
def test_too_long_is_one_code_however_long_and_wherever(running: ServiceThread, size: int) -> None:
    text, ids = "é" * size, [5] * size
    for path, more in (
        ("completions", {"prompt": text}),
        ("completions", {"prompt": ids}),
        ("embeddings", {"input": [text]}),
        ("embeddings", {"input": ids}),
        ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("responses", {"input": text}),
    ):
        response = running.post(f"/v1/{path}", {"model": "stories", **more})
        error = response.json["error"]
        assert (response.status, error["code"]) == (400, "context_length_exceeded"), error
        assert error["param"] in ("prompt", "input", "messages")
    chat = {"model": "stories", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    error = running.post("/v1/messages", chat).json["error"]
    assert error["message"].startswith("prompt is too long: ")
    # Claude Code reads both numbers
    counts = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert (counts is not None) == (size == 600)
    assert counts is None or (int(counts[1]) > 600 and counts[2] == "511")


def test_a_text_that_is_not_counted_to_its_end_says_what_the_engine_takes(
    running: ServiceThread,
) -> None:
    words = {"messages": [{"role": "user", "content": "q7" * 4000}], "max_tokens": 4}
    processor = running.engine.text_processor
    assert processor.tokenizer is not None
    processor.set_input_limits(processor.max_image_pixels, 1000, 512)
    try:
        chat = running.post("/v1/chat/completions", {"model": "stories", **words})
        error = chat.json["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].endswith("than 1000 tokens, this engine takes 512; shorten it")
        message = running.post("/v1/messages", {"model": "stories", **words}).json["error"]
        assert message["message"].startswith(
            "prompt is too long: more than 1000 tokens > 512 maximum"
        )
    finally:
        processor.set_input_limits(processor.max_image_pixels, max_tokenize_tokens(512), 512)


def test_what_this_machine_cannot_do_is_said_in_the_log(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client is referred to the log, which has the reason and the request's id, but nothing of
    the request's content.
    """
    why = "structured output needs llguidance"

    def missing() -> None:
        raise MissingDependency(why)

    monkeypatch.setattr("modelmill.text.grammar._import_llguidance", missing)
    body = {"model": "stories", "prompt": "a secret", "structured_outputs": {"regex": "secret"}}
    with json_logs.log_to_stderr("error"):
        response = running.post("/v1/completions", body, headers={"x-request-id": "mine-2"})
    assert (response.status, response.json["error"]["type"]) == (500, "server_error")
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["event"], entry["error"], entry["reason"]) == (
        "request failed",
        "MissingDependency",
        why,
    )
    assert entry["request_id"] == "mine-2"
    assert "secret" not in line
