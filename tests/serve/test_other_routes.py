"""Paths of other servers: without /v1, /ping, /props, /tokenize with tools, /completion, scores."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill.serve.path_aliases import PATH_ALIASES, canonical_path
from tests.serve.dialect_calls import events, post
from tests.serve.service_thread import ServiceThread

pytestmark = pytest.mark.usefixtures("brief_tools")

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def test_paths_without_v1(running: ServiceThread) -> None:
    body = {"messages": HI, "max_tokens": 3, "temperature": 0}
    choices = [
        post(running, path, body).json["choices"]
        for path in ("/chat/completions", "/v1/chat/completions")
    ]
    assert choices[0] == choices[1]
    assert running.get("/models").json == running.get("/v1/models").json
    assert running.get("/models/alias").json["id"] == "alias"
    assert canonical_path("/health") == "/health"
    assert all(canonical_path(path) != path for path in PATH_ALIASES)


def test_another_name_of_a_path_needs_the_key_too(running: ServiceThread) -> None:
    client = running.limited_client(api_keys=("secret",))
    assert running.run(client.get("/models")).status == 401
    assert running.run(client.get("/ping")).status == 200
    assert running.run(client.get("/props")).status == 401


def test_ping_and_props(running: ServiceThread) -> None:
    assert (running.get("/ping").status, running.post("/ping").status) == (200, 200)
    props = running.get("/props").json
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["model_alias"] == "stories"
    assert "messages" in props["chat_template"]


def test_tokenize_with_tools_counts_what_a_chat_counts(running: ServiceThread) -> None:
    count = post(running, "/tokenize", {"messages": HI, "tools": [TOOL]}).json["count"]
    body = {"messages": HI, "tools": [TOOL], "max_tokens": 1}
    assert post(running, "/v1/chat/completions", body).json["usage"]["prompt_tokens"] == count
    text = post(running, "/apply-template", {"messages": HI, "tools": [TOOL]}).json["prompt"]
    assert '"name": "f"' in text


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({}, "input_suffix", "input_suffix is not supported by this model"),
        ({"input_suffix": "a" * 60_000}, "input_suffix", "input_suffix has 60000 characters"),
        ({"input_prefix": "a" * 60_000}, "input_prefix", "the prompt has"),
        ({"prompt": "a" * 60_000}, "input_prefix", "the prompt has"),
    ],
)
def test_infill_names_its_own_fields(
    running: ServiceThread, more: dict[str, str], param: str, words: str
) -> None:
    """The vocabulary has no marks, so that every one of these is refused."""
    body = {"model": "stories", "input_prefix": "a", "input_suffix": "b", **more}
    answer = running.post("/infill", body)
    assert answer.status == 400
    assert answer.json["error"]["param"] == param
    assert answer.json["error"]["message"].startswith(words)


def test_a_schema_of_a_raw_prompt_is_named_as_in_ollamas_api(running: ServiceThread) -> None:
    body = {"model": "stories", "prompt": "a", "raw": True, "format": {"type": "no"}}
    answer = running.post("/api/generate", body)
    assert answer.status == 400
    assert answer.json["error"].startswith("format: ")


def test_a_request_without_a_model(running: ServiceThread) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": None}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}),
    ):
        answer = running.post(path, body)
        assert (answer.status, answer.json["model"]) == (200, "stories"), answer.body
    for path, body in (
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/v1/responses/input_tokens", {"input": "a"}),
        ("/v1/responses/compact", {"input": "a", "max_output_tokens": 4}),
    ):
        answer = running.post(path, body)
        assert answer.status == 200, (path, answer.body)


def test_grammars_in_both_notations(running: ServiceThread) -> None:
    for grammar in ('root ::= "yes" | "no"', 'start: "yes" | "no"'):
        body = {"prompt": "a", "max_tokens": 9, "structured_outputs": {"grammar": grammar}}
        assert post(running, "/v1/completions", body).json["choices"][0]["text"] in ("yes", "no")
    assert post(running, "/completion", {"prompt": "a", "n_predict": 1, "grammar": ""}).json["stop"]
    body = {"model": "stories", "prompt": "a", "structured_outputs": {"grammar": "root ::= ("}}
    assert running.post("/v1/completions", body).json["error"]["param"] == "structured_outputs"


def test_a_json_object_with_a_schema(running: ServiceThread) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    body = {"messages": HI, "max_tokens": 200, "temperature": 0}
    object_format = {"type": "json_object", "schema": schema}
    answer = post(running, "/v1/chat/completions", {**body, "response_format": object_format}).json
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}
    wrong = {"model": "stories", **body, "response_format": {**object_format, "type": "text"}}
    refused = running.post("/v1/chat/completions", wrong)
    assert "takes no schema" in refused.json["error"]["message"]


def test_tokenize_as_llama_cpp(running: ServiceThread) -> None:
    plain = post(running, "/tokenize", {"content": "Once"}).json["tokens"]
    with_bos = post(running, "/tokenize", {"content": "Once", "add_special": True}).json["tokens"]
    assert with_bos == [1, *plain]
    pieces = post(running, "/tokenize", {"content": "Once", "with_pieces": True}).json["tokens"]
    assert [each["id"] for each in pieces] == plain
    both = running.post("/tokenize", {"content": "x", "prompt": "x"})
    assert both.status == 400


def test_completion_as_llama_cpp(running: ServiceThread) -> None:
    body: dict[str, Any] = {"prompt": "Once upon", "n_predict": 6, "temperature": 0}
    whole = running.post("/completion", {**body, "samplers": ["top_k"], "return_token_ids": True})
    assert whole.status == 200, whole.body
    answer = whole.json
    assert (answer["stop_type"], answer["tokens_predicted"]) == ("limit", 6)
    assert len(answer["tokens"]) == 6
    reference = post(
        running, "/v1/completions", {"prompt": "Once upon", "max_tokens": 6, "temperature": 0}
    ).json
    assert answer["content"] == reference["choices"][0]["text"]
    streamed = [
        event for _, event in events(running.post("/completion", {**body, "stream": True}).body)
    ]
    assert "".join(event["content"] for event in streamed) == answer["content"]
    assert [event["stop"] for event in streamed][-2:] == [False, True]
    word = running.post("/completion", {**body, "stop": [answer["content"][3:6]]}).json
    assert (word["stop_type"], word["stopping_word"]) == ("word", answer["content"][3:6])


def test_streams_of_llama_cpp_have_tokens_and_settings(running: ServiceThread) -> None:
    body = {"prompt": "Once", "n_predict": 4, "temperature": 0, "seed": 7}
    whole = post(running, "/completion", {**body, "return_tokens": True}).json
    *made, last = [
        event for _, event in events(post(running, "/completion", {**body, "stream": True}).body)
    ]
    assert [id for event in made for id in event["tokens"]] == whole["tokens"]
    settings = last["generation_settings"]
    assert settings == {**whole["generation_settings"], "stream": True}
    assert (settings["n_predict"], settings["seed"], settings["temperature"]) == (4, 7, 0)
    more = {"repeat_penalty": 1.5, "logit_bias": [[9, -1.0]], "n_probs": 2, "top_k": 3}
    changed = post(running, "/completion", {**body, **more}).json["generation_settings"]
    assert (changed["repeat_penalty"], changed["n_probs"], changed["top_k"]) == (1.5, 2, 3)
    assert changed["logit_bias"] == [{"token": 9, "bias": -1.0}]


def test_chosen_fields_of_llama_cpp(running: ServiceThread) -> None:
    paths = ["content", "timings/prompt_n", "generation_settings/n_predict", "prompt", "a/b"]
    body = {"prompt": "Once", "n_predict": 4, "temperature": 0, "response_fields": paths}
    whole = post(running, "/completion", body).json
    assert list(whole) == paths[:-1]
    assert (whole["generation_settings/n_predict"], whole["prompt"]) == (4, "<s> Once")
    several = post(running, "/completion", {**body, "prompt": ["Once", "Tom"]}).json
    assert [each["prompt"] for each in several] == ["<s> Once", "<s> Tom"]
    made = [
        event for _, event in events(post(running, "/completion", {**body, "stream": True}).body)
    ]
    assert made[0]["stop"] is False
    assert list(made[-1]) == paths[:-1]


def test_rates_do_not_count_the_token_that_comes_with_the_prompt(running: ServiceThread) -> None:
    body = {"prompt": "Once", "temperature": 0}
    one, several = (
        post(running, "/completion", {**body, "n_predict": count}).json["timings"]
        for count in (1, 8)
    )
    assert (one["predicted_n"], one["predicted_per_second"]) == (1, 0)
    assert several["predicted_per_second"] == pytest.approx(7000 / several["predicted_ms"])
    assert several["predicted_per_token_ms"] == pytest.approx(several["predicted_ms"] / 7)


def test_an_answer_that_the_context_ends_is_truncated(running: ServiceThread) -> None:
    body = {"prompt": "Once", "n_predict": -1, "temperature": 0, "ignore_eos": True}
    ended = post(running, "/completion", body).json
    assert (ended["truncated"], ended["stop_type"]) == (True, "limit")
    assert ended["tokens_evaluated"] + ended["tokens_predicted"] == 512
    assert post(running, "/completion", {**body, "n_predict": 2}).json["truncated"] is False


def test_counts_of_a_conversation_as_llama_cpp(running: ServiceThread) -> None:
    body = {"messages": HI, "tools": [TOOL]}
    count = post(running, "/chat/completions/input_tokens", body).json["input_tokens"]
    assert count == post(running, "/tokenize", body).json["count"]


def test_penalties_and_biases_as_llama_cpp(running: ServiceThread) -> None:
    body: dict[str, Any] = {"prompt": "Once", "n_predict": 8, "temperature": 0}
    plain, neutral, penalized, same = (
        running.post(path, {**body, **more}).json
        for path, more in (
            ("/completion", {}),
            ("/completion", {"repeat_penalty": 1.0, "repeat_last_n": 64, "lora": []}),
            ("/completion", {"repeat_penalty": 1.9, "image_data": []}),
            ("/v1/completions", {"max_tokens": 8, "repetition_penalty": 1.9}),
        )
    )
    assert neutral["content"] == plain["content"] != penalized["content"]
    assert penalized["content"] == same["choices"][0]["text"]
    first = running.post("/completion", {**body, "return_token_ids": True}).json["tokens"][0]
    for bias in ([[first, False]], [[first, -100]], {str(first): -100}):
        biased = running.post("/completion", {**body, "logit_bias": bias}).json
        assert biased["content"][:3] != plain["content"][:3]
    for more, message in (
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n is not supported"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty is"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora: is not supported"),
        ({"logit_bias": [["a", 1]]}, "logit_bias"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias: number 0 must begin with a token id"),
        ({"logit_bias": {"5": 1, "77": 1000}}, "logit_bias: the bias of token 77 must be between"),
    ):
        refused = running.post("/completion", {**body, **more})
        assert refused.status == 400
        assert refused.json["error"]["message"].startswith(message)


def test_prompts_of_completion_as_llama_cpp_takes_them(running: ServiceThread) -> None:
    body: dict[str, Any] = {"n_predict": 5, "temperature": 0}
    once, tom = (post(running, "/tokenize", {"prompt": text}).json["tokens"]
                 for text in ("Once upon", "Tom"))  # fmt: skip
    bare = post(running, "/tokenize", {"content": "Tom"}).json["tokens"]
    single = [
        post(running, "/completion", {**body, "prompt": prompt}).json
        for prompt in (once, [*once, "Tom"], ["Once upon", *bare], [*once, *bare])
    ]
    assert (single[0]["index"], single[0]["tokens_evaluated"]) == (0, len(once))
    assert len({each["content"] for each in single[1:]}) == 1, "BOS comes before a first text only"
    assert {each["tokens_evaluated"] for each in single[1:]} == {len(once) + len(bare)}
    prompts = ["Once upon", tom, [*once, "Tom"]]
    several = post(running, "/completion", {**body, "prompt": prompts}).json
    alone = [post(running, "/completion", {**body, "prompt": each}).json for each in prompts]
    assert [each["content"] for each in several] == [each["content"] for each in alone]
    assert [each["index"] for each in several] == [0, 1, 2]
    assert post(running, "/completion", {**body, "prompt": ["Tom"]}).json["index"] == 0
    streamed = [
        event
        for _, event in events(
            post(running, "/completion", {**body, "prompt": prompts, "stream": True}).body
        )
    ]
    for index, each in enumerate(several):
        own = [event for event in streamed if event["index"] == index]
        assert "".join(event["content"] for event in own) == each["content"]
        assert [event["stop"] for event in own] == [False] * (len(own) - 1) + [True]
        assert own[-1]["tokens_evaluated"] == each["tokens_evaluated"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        (["a", ""], "prompt[1] is empty"),
        ([1, [2]], "prompt has token ids beside lists"),
        (["a"] * 1025, "prompt has 1025 prompts; the limit is 1024"),
        ([True], "prompt: must be a string, token ids, both in one list, or a list of such"),
        ([1, "x" * 30000], "the prompt has 30000 characters"),
        ([1] * 600, "the prompt has 600 tokens"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_prompts_that_completion_refuses(running: ServiceThread, prompt: Any, message: str) -> None:
    refused = running.post("/completion", {"prompt": prompt, "n_predict": 1})
    assert refused.status == 400
    assert refused.json["error"]["message"].startswith(message), refused.body


def test_probabilities_as_llama_cpp_returns_them(running: ServiceThread) -> None:
    body: dict[str, Any] = {"prompt": "Once", "n_predict": 4, "temperature": 0, "n_probs": 2}
    whole = post(running, "/completion", {**body, "return_tokens": True}).json
    listed = whole["completion_probabilities"]
    assert [each["id"] for each in listed] == whole["tokens"]
    completion = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    reference = post(running, "/v1/completions", completion).json["choices"][0]["logprobs"]
    logprobs = [each["logprob"] for each in listed]
    assert logprobs == pytest.approx(reference["token_logprobs"], abs=1e-5)
    for each in listed:
        best = each["top_logprobs"]
        assert (len(best), best[0]["id"]) == (2, each["id"])
        assert bytes(each["bytes"]).decode("utf-8", "replace") == each["token"]
    made = events(post(running, "/completion", {**body, "stream": True}).body)
    streamed = [each for _, event in made for each in event.get("completion_probabilities", ())]
    assert [each["id"] for each in streamed] == whole["tokens"]
    plain = post(running, "/completion", {**body, "n_probs": 0}).json
    assert "completion_probabilities" not in plain
    assert plain["tokens"] == []
    assert running.post("/completion", {**body, "n_probs": 21}).status == 400


def test_ids_as_text_under_both_names(running: ServiceThread) -> None:
    ids = post(running, "/tokenize", {"content": "Once upon"}).json["tokens"]
    text = post(running, "/detokenize", {"tokens": ids}).json
    assert text["content"] == text["prompt"]
    assert text["content"].strip() == "Once upon"


def test_infill_needs_a_vocabulary_with_marks(running: ServiceThread) -> None:
    body: dict[str, Any] = {"input_prefix": "a", "input_suffix": "b"}
    for extra, message in (
        ([{"text": "c", "filename": "d", "time": 1}], "input_suffix is not supported"),
        ([{"text": "c"}, {"filename": "d"}], "input_extra[1].text: field required"),
        ([{"text": 5}], "input_extra[0].text: must be a string"),
    ):
        refused = running.post("/infill", {**body, "input_extra": extra})
        assert refused.status == 400
        assert refused.json["error"]["message"].startswith(message)


def test_rerank_as_tei(running: ServiceThread) -> None:
    texts = ["Once upon a time", "The dog ran", "Lily"]
    body = {"query": texts[0], "texts": texts}
    ranked = post(running, "/rerank", {**body, "return_text": True}).json
    usual = post(running, "/rerank", {"query": texts[0], "documents": texts}).json["results"]
    assert [(each["index"], each["score"], each["text"]) for each in ranked] == [
        (each["index"], each["relevance_score"], each["document"]["text"]) for each in usual
    ]
    assert post(running, "/rerank", {**body, "top_n": 1}).json == [
        {"index": ranked[0]["index"], "score": ranked[0]["score"]}
    ]
    for wrong in ({"query": "x"}, {**body, "documents": texts}, {"query": "x", "texts": [""]}):
        assert running.post("/rerank", wrong).status == 400


def test_rerank_and_score_are_cosines(running: ServiceThread) -> None:
    texts = ["The dog ran", "A red ball", "The dog ran home"]
    vectors = [
        each["embedding"] for each in post(running, "/v1/embeddings", {"input": texts}).json["data"]
    ]
    cosines = [sum(a * b for a, b in zip(vectors[0], vector)) for vector in vectors]
    ranked = post(running, "/v2/rerank", {"query": texts[0], "documents": texts, "top_n": 2}).json
    assert ranked["method"] == "embedding_cosine"
    assert [each["index"] for each in ranked["results"]] == [
        0, max((1, 2), key=lambda index: cosines[index]),
    ]  # fmt: skip
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1)
    assert ranked["results"][0]["document"] == {"text": texts[0]}
    scored = post(running, "/score", {"text_1": texts[0], "text_2": texts}).json["data"]
    assert [each["score"] for each in scored] == pytest.approx(cosines, abs=1e-5)
    for path, body in (
        ("/v1/rerank", {"query": "x", "documents": [{"no": "text"}]}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}),
        ("/v1/score", {"text_1": "a"}),
    ):
        assert running.post(path, {"model": "stories", **body}).status == 400
