"""Fields of other servers: what they do here, what is ignored, what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.compatibility_fields import list_compatibility_fields
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.dialects.anthropic_schema import MessagesRequest
from modelmill.serve.message_cleaning import clean_messages
from modelmill.serve.request_options import bad_word_ids
from tests.serve.dialect_calls import MODEL, events, post
from tests.serve.service_thread import ServiceThread

PROMPT = "Once upon a time"
COMPLETE: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
HI = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"messages": HI, "temperature": 0, "max_tokens": 8}


def complete(running: ServiceThread, **more: Any) -> Any:
    return post(running, "/v1/completions", {**COMPLETE, **more}).json


def ids_of(running: ServiceThread, text: str) -> list[int]:
    ids: list[int] = post(running, "/tokenize", {"prompt": text, "add_special_tokens": False}).json[
        "tokens"
    ]
    return ids


IGNORED: dict[str, Any] = {
    "user": "u", "store": True, "metadata": {"a": "b"}, "prediction": {"type": "content"},
    "id_slot": 3, "n_keep": 4, "dry_base": 1.75, "spaces_between_special_tokens": True,
    "typical_p": 1.0, "mirostat": 0, "xtc_probability": 0.0, "use_beam_search": False,
    "functions": None, "function_call": None, "service_tier": "auto", "prompt_cache_key": "k",
    "echo": False, "best_of": 1, "detokenize": True, "repeat_penalty": 1.0, "lora": [],
    "vllm_xargs": {}, "repeat_last_n": 64,
}  # fmt: skip
IGNORED_BY_CHAT: dict[str, Any] = {
    **IGNORED, "documents": [], "include_reasoning": True, "reasoning_format": "auto",
    "parse_tool_calls": True,
}  # fmt: skip


def test_ignored_fields_and_nulls_change_nothing(running: ServiceThread) -> None:
    plain = complete(running)["choices"]
    assert complete(running, **IGNORED)["choices"] == plain
    chat = post(running, "/v1/chat/completions", CHAT).json["choices"]
    assert (
        post(running, "/v1/chat/completions", {**CHAT, **IGNORED_BY_CHAT}).json["choices"] == chat
    )


VLLM_DEFAULTS: dict[str, Any] = {
    "request_id": "r", "return_token_offsets": False, "return_mm_kwargs": False,
    "return_prompt_text": False, "mm_processor_kwargs": {}, "media_io_kwargs": None,
    "kv_transfer_params": None,
}  # fmt: skip
VLLM_POOLING_DEFAULTS: dict[str, Any] = {
    "padding": "do_not_pad", "truncation_side": "right", "embed_dtype": "float32",
    "endianness": "native", "use_activation": True,
}  # fmt: skip
VLLM_ANSWER_DEFAULTS: dict[str, Any] = {
    "spaces_between_special_tokens": True, "vllm_xargs": {}, "detokenize": True,
    "length_penalty": 1.0, "use_beam_search": False, "echo": False, "include_reasoning": True,
}  # fmt: skip
WITH_DEFAULTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/embeddings", {"input": "Hi"}, {"echo": False, **VLLM_POOLING_DEFAULTS}),
    ("/score", {"text_1": "Hi", "text_2": "Ho"}, {"echo": False, **VLLM_POOLING_DEFAULTS}),
    ("/rerank", {"query": "Hi", "documents": ["Ho"]}, {"echo": False, **VLLM_POOLING_DEFAULTS}),
    ("/tokenize", {"prompt": "Hi"}, {"echo": False}),
    ("/detokenize", {"tokens": [5]}, {}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}, VLLM_ANSWER_DEFAULTS),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}, VLLM_ANSWER_DEFAULTS),
    ("/v1/messages", {"messages": HI, "max_tokens": 2}, {"echo": None}),
]


@pytest.mark.parametrize(
    ("path", "body", "more"), WITH_DEFAULTS, ids=[p for p, *_ in WITH_DEFAULTS]
)
def test_defaults_of_vllm_and_nulls_are_accepted(
    running: ServiceThread, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    response = running.post(path, {"model": "stories", **body, **VLLM_DEFAULTS, **more})
    assert response.status == 200, response.body
    plain = running.post(path, {"model": "stories", **body})
    for name in ("data", "results", "tokens", "prompt"):
        assert response.json.get(name) == plain.json.get(name)
    for wrong in ({"return_mm_kwargs": True}, {"odd": 1}):
        refused = running.post(path, {"model": "stories", **body, **wrong})
        assert refused.status == 400, refused.body


@pytest.mark.parametrize("field", ["padding", "embed_dtype", "truncation_side", "endianness"])
def test_what_would_change_an_embedding_is_refused(running: ServiceThread, field: str) -> None:
    wrong = {
        "padding": "max_length", "embed_dtype": "float16", "truncation_side": "left",
        "endianness": "big",
    }[field]  # fmt: skip
    response = running.post("/v1/embeddings", {"model": "stories", "input": "a", field: wrong})
    assert response.status == 400
    assert response.json["error"]["param"] == field


def test_min_tokens_of_messages_is_that_of_chat(running: ServiceThread) -> None:
    body = {"messages": HI, "max_tokens": 8, "temperature": 0}
    usage = post(running, "/v1/messages", {**body, "min_tokens": 8}).json["usage"]
    assert usage["output_tokens"] == 8
    assert running.post("/v1/messages", {**body, "min_tokens": -1}).status == 400


def test_template_options_of_messages_reach_the_chat() -> None:
    body = MessagesRequest.model_validate(
        {"messages": HI, "max_tokens": 1, "chat_template_kwargs": {"a": 1}, "min_tokens": 1}
    )
    chat = body.to_chat_request()
    assert (chat.chat_template_kwargs, chat.min_tokens) == ({"a": 1}, 1)


def test_every_ignored_field_has_its_reason() -> None:
    rows = list_compatibility_fields([CompletionRequest, ChatRequest])
    assert {"user", "id_slot", "typical_p", "metadata"} <= {name for name, _, _ in rows}
    assert all(reason for _, _, reason in rows)
    assert {kind for _, kind, _ in rows} == {"ignored", "off only"}


REFUSED_BY_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"echo": True}, "echo: is not supported; leave it out, or send false"),
    ({"best_of": 2}, "best_of: is not supported; leave it out, or send 1"),
    ({"documents": ["x"]}, "documents: is not supported; leave it out, or send []"),
    ({"reasoning_format": "none"}, "reasoning_format: is not supported; leave it out, or send 'a"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs: is not supported; leave it out, or send {}"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, "repeat_penalty is repetition_penalty"),
    ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n is not supported"),
    ({"response_format": {"type": "grammar"}}, "response_format of type grammar needs grammar"),
    ({"response_format": {"type": "text", "grammar": "x"}},
     "response_format of type text takes no grammar"),
    ({"response_format": {"type": "grammar", "grammar": "root ::= ("}},
     "response_format: grammar: it is no grammar in GBNF or Lark"),
    ({"messages": [*HI, {"role": "assistant", "content": "x", "prefix": True}]},
     "messages: prefix is not supported; send continue_final_message: true"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "start"), REFUSED_BY_CHAT, ids=range(len(REFUSED_BY_CHAT)))
def test_what_chat_refuses(running: ServiceThread, more: dict[str, Any], start: str) -> None:
    response = running.post("/v1/chat/completions", {"model": "stories", **CHAT, **more})
    assert response.status == 400, response.body
    assert response.json["error"]["message"].startswith(start), response.body


def test_repeat_penalty_is_the_repetition_penalty(running: ServiceThread) -> None:
    texts = [
        complete(running, **more)["choices"][0]["text"]
        for more in ({}, {"repeat_penalty": 1.9}, {"repetition_penalty": 1.9})
    ]
    assert texts[0] != texts[1] == texts[2]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"typical_p": 0.5}, "typical_p: is not supported; leave it out, or send 1"),
    ({"mirostat": 2}, "mirostat"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"logit_bias": {"the": 1}}, "logit_bias takes token ids as keys, not 'the'"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"], "structured_outputs": {"choice": ["y"]}}, "bad_words"),
    ({"allowed_token_ids": [1], "grammar": 'root ::= "a"'}, "grammar and allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"grammar": "root ::= ("}, "grammar"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"odd": 1}, "odd"),
]


@pytest.mark.parametrize(("more", "start"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_change_the_answer_in_silence_is_refused(
    running: ServiceThread, more: dict[str, Any], start: str
) -> None:
    response = running.post("/v1/completions", {"model": "stories", **COMPLETE, **more})
    assert response.status == 400, response.body
    assert response.json["error"]["message"].startswith(start), response.body


@pytest.mark.parametrize("wrong", [-1, 999999, 1 << 40, 1 << 70])
@pytest.mark.parametrize("more", [{}, {"echo": True}, {"truncate_prompt_tokens": 2}])
def test_a_wrong_token_id_is_told_the_range(
    running: ServiceThread, wrong: int, more: dict[str, Any]
) -> None:
    for prompt, start in (
        ([wrong], "the prompt's"),
        ([[3], [3, wrong]], "prompt[1]: the prompt's"),
    ):
        body = {"model": MODEL, **COMPLETE, "prompt": prompt, **more}
        response = running.post("/v1/completions", body)
        assert response.status == 400, response.body
        error = response.json["error"]
        assert error["message"] == f"{start} token ids must be between 0 and 511"
        assert error["param"] == "prompt"


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("kv_connector", None),
        ("prompt_embeds", None),
        ("stop_words", "stop"),
        ("max_token", "max_tokens"),
    ],
)
def test_only_a_similar_field_is_hinted_at(
    running: ServiceThread, field: str, hint: str | None
) -> None:
    response = running.post("/v1/chat/completions", {"model": MODEL, **CHAT, field: 1})
    expected = f"{field}: unknown field" + (f"; did you mean {hint}?" if hint else "")
    assert response.json["error"]["message"] == expected


def test_n_predict_is_the_length(running: ServiceThread) -> None:
    body = {"prompt": PROMPT, "temperature": 0}
    usage = post(running, "/v1/completions", {**body, "n_predict": 3}).json["usage"]
    assert usage["completion_tokens"] == 3
    chat = {"messages": HI, "temperature": 0, "n_predict": 3}
    usage = post(running, "/v1/chat/completions", chat).json["usage"]
    assert usage["completion_tokens"] == 3


def test_allowed_token_ids_are_the_only_ones(running: ServiceThread) -> None:
    allowed = [300, 301, 302]
    more = {"allowed_token_ids": allowed, "return_token_ids": True, "n": 2, "temperature": 1.5}
    for choice in complete(running, seed=1, **more)["choices"]:
        assert len(choice["token_ids"]) == 8
        assert set(choice["token_ids"]) <= set(allowed)


def test_fewest_tokens_of_allowed_ids(running: ServiceThread) -> None:
    """An allowed stop token is not sampled too early, unless nothing else is allowed."""
    stop = complete(running, max_tokens=1, return_token_ids=True)["choices"][0]["token_ids"][0]
    more = {"stop_token_ids": [stop], "logit_bias": {str(stop): 100}, "temperature": 0}
    usage = complete(running, **more, allowed_token_ids=[stop, 300], min_tokens=5)["usage"]
    assert usage["completion_tokens"] == 6
    usage = complete(running, **more, allowed_token_ids=[stop], min_tokens=5)["usage"]
    assert usage["completion_tokens"] == 1


def test_fewest_tokens_beside_a_grammar_are_a_warning(running: ServiceThread) -> None:
    answer = complete(running, structured_outputs={"choice": ["a", "b"]}, min_tokens=5)
    assert answer["warnings"] == [
        "min_tokens has no effect: the grammar decides where the answer ends"
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_allowed_ids_outside_the_vocabulary_are_refused_before_the_stream(
    running: ServiceThread, stream: bool
) -> None:
    for path, body in (("/v1/completions", COMPLETE), ("/v1/chat/completions", CHAT)):
        more = {"allowed_token_ids": [10**6], "stream": stream}
        reply = running.post(path, {"model": MODEL, **body, **more})
        assert reply.status == 400
        assert reply.json["error"]["param"] == "allowed_token_ids"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/apply-template", {"messages": HI}),
        ("/detokenize", {"tokens": [300]}),
        ("/v1/messages/count_tokens", {"messages": HI}),
    ],
)
def test_what_loads_a_model_takes_keep_alive(
    running: ServiceThread, path: str, body: dict[str, Any]
) -> None:
    post(running, path, {**body, "keep_alive": "3m"})
    refused = running.post(path, {"model": MODEL, **body, "keep_alive": "3 moons"})
    assert refused.status == 400
    assert "keep_alive" in str(refused.json)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [10**7]}, "prompt"),
        ("/v1/chat/completions", {"messages": [HI[0] | {"content": "a " * 5000}]}, "messages"),
        ("/v1/responses", {"input": "a " * 5000}, "input"),
    ],
)
def test_an_error_about_the_prompt_names_the_field_that_was_sent(
    running: ServiceThread, path: str, body: dict[str, Any], param: str
) -> None:
    reply = running.post(path, {"model": MODEL, **body})
    assert reply.status == 400
    assert reply.json["error"]["param"] == param


def test_biases_as_llama_cpp_writes_them(running: ServiceThread) -> None:
    first, second = complete(running, max_tokens=2, return_token_ids=True)["choices"][0][
        "token_ids"
    ]
    banned: list[Any] = [[[first, False]], [first, False], [[first, -100]], {str(first): False}]
    for bias in banned:
        for path, body in (("/v1/completions", COMPLETE), ("/v1/chat/completions", CHAT)):
            more = {"logit_bias": bias, "return_token_ids": True}
            choice = post(running, path, {**body, **more}).json["choices"][0]
            assert first not in choice["token_ids"]
    forced = complete(running, max_tokens=1, return_token_ids=True, logit_bias=[[second, 100.0]])
    assert forced["choices"][0]["token_ids"] == [second]
    wrong = {"model": "stories", **COMPLETE, "logit_bias": {"5": 1, "77": 1000}}
    message = running.post("/v1/completions", wrong).json["error"]["message"]
    assert message == "logit_bias: the bias of token 77 must be between -100 and 100, not 1000.0"


def test_bad_words_do_not_occur(running: ServiceThread) -> None:
    text = complete(running)["choices"][0]["text"]
    word = text.split()[1].strip(",.")
    other = complete(running, bad_words=[word])["choices"][0]["text"]
    assert word in text
    assert word not in other


def test_bad_words_are_banned_with_and_without_a_space(running: ServiceThread) -> None:
    tokenizer = running.engine.text_processor.tokenizer
    assert tokenizer is not None
    ids = bad_word_ids(tokenizer, ["girl"])
    assert {tokenizer.decode(list(each)).strip() for each in ids} == {"girl"}


def test_a_prompt_is_cut_at_its_front(running: ServiceThread) -> None:
    ids = ids_of(running, "Tom and Lily like to play")
    cut = complete(running, prompt="Tom and Lily like to play", truncate_prompt_tokens=4)
    same = complete(running, prompt=ids[-4:])
    assert cut["usage"]["prompt_tokens"] == 4
    assert cut["choices"][0]["text"] == same["choices"][0]["text"]
    long = complete(running, prompt="a b " * 700, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == 511
    chat = {**CHAT, "truncate_prompt_tokens": 6}
    assert post(running, "/v1/chat/completions", chat).json["usage"]["prompt_tokens"] == 6


def test_a_prompt_is_cut_at_its_end(running: ServiceThread) -> None:
    ids = [1, *ids_of(running, PROMPT)]
    right = {"truncate_prompt_tokens": 3, "truncation_side": "right", "return_token_ids": True}
    assert complete(running, **right)["choices"][0]["prompt_token_ids"] == ids[:3]
    left = complete(running, **right | {"truncation_side": "left"})
    assert left["choices"][0]["prompt_token_ids"] == ids[-3:]
    whole = complete(running, truncation_side="right", return_token_ids=True)
    assert whole["choices"][0]["prompt_token_ids"] == ids
    chat = {path: post(running, "/v1/chat/completions", {**CHAT, **more, "return_token_ids": True})
            for path, more in (("all", {}), ("cut", right))}  # fmt: skip
    prompts = {name: each.json["prompt_token_ids"] for name, each in chat.items()}
    assert prompts["cut"] == prompts["all"][:3]


def test_prompt_logprobs_are_those_of_echo(running: ServiceThread) -> None:
    whole = complete(running, prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
    echo = complete(running, echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    ids = [1, *ids_of(running, PROMPT)]
    assert whole[0] is None
    for id, entry, logprob in zip(ids[1:], whole[1:], echo["token_logprobs"][1:]):
        assert math.isclose(entry[str(id)]["logprob"], logprob)
        assert entry[str(id)]["rank"] >= 1
    chat = post(running, "/v1/chat/completions", {**CHAT, "prompt_logprobs": 0}).json
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_fields_of_vllm_that_were_not_asked_for_are_null(running: ServiceThread) -> None:
    """Its clients read them as attributes of objects, which have those that are in the answer."""
    names = {"token_ids", "prompt_token_ids", "prompt_logprobs"}
    choice = complete(running)["choices"][0]
    assert {name for name in names if choice[name] is None} == names
    requested = complete(running, return_token_ids=True, prompt_logprobs=0)["choices"][0]
    assert not [name for name in names if requested[name] is None]
    chat = post(running, "/v1/chat/completions", CHAT).json
    assert (chat["prompt_token_ids"], chat["prompt_logprobs"]) == (None, None)
    assert chat["choices"][0]["token_ids"] is None
    fields = {"return_token_ids": True, "prompt_logprobs": 0}
    requested = post(running, "/v1/chat/completions", {**CHAT, **fields}).json
    assert len(requested["prompt_token_ids"]) == len(requested["prompt_logprobs"])
    assert requested["choices"][0]["token_ids"]
    assert post(running, "/tokenize", {"prompt": "Hi"}).json["token_strs"] is None


def test_tokens_as_ids(running: ServiceThread) -> None:
    more = {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(running, **more)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in choice["token_ids"]]
    chat = {**CHAT, **more, "logprobs": True, "top_logprobs": 1}
    choice = post(running, "/v1/chat/completions", chat).json["choices"][0]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{id}" for id in choice["token_ids"][: len(tokens)]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_every_event(running: ServiceThread, path: str) -> None:
    body = COMPLETE if path == "/v1/completions" else CHAT
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = {**body, "stream": True, "stream_options": options, "timings_per_token": True}
    made = [event for _, event in events(post(running, path, stream).body)]
    counts = [event["usage"]["completion_tokens"] for event in made]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert made[-2]["timings"]["predicted_n"] == 8


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_event_of_a_stream_is_true_of_the_cache(running: ServiceThread, path: str) -> None:
    """What was cached is not known before the first token: no event says otherwise."""
    text = "The dog ran to the tree and the cat. " * 4
    asks = {"prompt": text} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": text}]
    }  # fmt: skip
    body = {**asks, "max_tokens": 4, "temperature": 0}
    post(running, path, body)
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = {**body, "stream": True, "stream_options": options, "timings_per_token": True}
    made = [event for _, event in events(post(running, path, stream).body)]
    total = made[-1]["usage"]
    cached = total["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    details = [event["usage"].get("prompt_tokens_details") for event in made]
    timings = [event.get("timings") for event in made if event["choices"]]
    if path == "/v1/chat/completions":  # its first event has the role
        assert (details.pop(0), timings.pop(0)) == (None, None)
    assert all(each == {"cached_tokens": cached} for each in details)
    counts = [(each["cache_n"], each["prompt_n"]) for each in timings if each]
    assert counts == [(cached, total["prompt_tokens"] - cached)] * len(timings)
    assert {event["usage"]["prompt_tokens"] for event in made} == {total["prompt_tokens"]}


def test_timings_and_the_fingerprint(running: ServiceThread) -> None:
    whole = complete(running, timings_per_token=True)
    timings = whole["timings"]
    assert timings["predicted_n"] == 8
    assert timings["prompt_n"] + timings["cache_n"] == whole["usage"]["prompt_tokens"]
    assert timings["predicted_per_second"] > 0
    chat = post(running, "/v1/chat/completions", CHAT).json
    assert chat["system_fingerprint"] == whole["system_fingerprint"]
    assert chat["system_fingerprint"].startswith("fp_")


def test_cache_prompt_false_reads_the_whole_prompt(running: ServiceThread) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "The dog ran. " * 10}]}
    cached = [
        post(running, "/v1/chat/completions", {**body, "cache_prompt": keep}).json["usage"][
            "prompt_tokens_details"
        ]["cached_tokens"]
        for keep in (True, True, False, False)
    ]
    assert cached[1] > 0
    assert cached[2:] == [0, 0]


def test_grammars_of_llama_cpp(running: ServiceThread) -> None:
    text = complete(running, grammar='root ::= ("yes" | "no") "!"')["choices"][0]["text"]
    assert text in ("yes!", "no!")
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    chat = {**CHAT, "json_schema": schema, "max_tokens": 60}
    content = post(running, "/v1/chat/completions", chat).json["choices"][0]["message"]["content"]
    assert json.loads(content) == {"a": 1}


@pytest.mark.parametrize("grammar", ['root ::= "yes" | "no"', 'start: "yes" | "no"'])
def test_a_response_format_of_a_grammar(running: ServiceThread, grammar: str) -> None:
    constraint = {"type": "grammar", "grammar": grammar}
    answer = post(running, "/v1/chat/completions", {**CHAT, "response_format": constraint}).json
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")


def test_a_schema_that_is_made_weaker_is_told(running: ServiceThread) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    constraint = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = {**CHAT, "response_format": constraint, "max_tokens": 60}
    whole = post(running, "/v1/chat/completions", body).json
    assert whole["warnings"] == ["response_format: uniqueItems is not enforced"]
    assert isinstance(json.loads(whole["choices"][0]["message"]["content"]), list)
    first = next(events(post(running, "/v1/chat/completions", {**body, "stream": True}).body))[1]
    assert first["warnings"] == whole["warnings"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": schema}, "required": ["a"]}}}  # fmt: skip
    forced = {**CHAT, "tools": [tool], "tool_choice": "required", "max_tokens": 200}
    assert post(running, "/v1/chat/completions", forced).json["warnings"] == [
        "tools: f: #/properties/a: uniqueItems is not enforced"
    ]


def test_a_response_format_beside_a_forced_call(running: ServiceThread) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {**CHAT, "tools": [tool], "tool_choice": "required", "max_tokens": 200,
            "response_format": {"type": "json_object"}}  # fmt: skip
    whole = post(running, "/v1/chat/completions", body).json
    assert whole["choices"][0]["message"]["tool_calls"]
    assert whole["warnings"] == ["response_format: it has no effect where a call is forced"]


def test_allowed_tools(running: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelmill.text.tool_prompts.TOOLS_SYSTEM_PROMPT", "{tools}")
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    named = {"type": "function", "function": {"name": "g"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    body = {**CHAT, "tools": tools, "tool_choice": choice, "max_tokens": 200}
    message = post(running, "/v1/chat/completions", body).json["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["g"]
    choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "h"}}]
    refused = running.post("/v1/chat/completions", {"model": "stories", **body})
    assert refused.status == 400


def test_an_answer_that_goes_on(running: ServiceThread) -> None:
    body = {**CHAT, "messages": [*HI, {"role": "assistant", "content": "Once upon a"}]}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    choice = post(running, "/v1/chat/completions", {**body, **more}).json["choices"][0]
    assert choice["message"]["content"].startswith(" time")
    for wrong in (
        {"add_generation_prompt": True},
        {"messages": HI},
        {"messages": body["messages"][1:]},
        {"response_format": {"type": "json_object"}},
    ):
        ask = {"model": "stories", **body, "continue_final_message": True, **wrong}
        assert running.post("/v1/chat/completions", ask).status == 400, wrong
    bare = post(running, "/v1/chat/completions", {**CHAT, "add_generation_prompt": False}).json
    usual = post(running, "/v1/chat/completions", CHAT).json
    assert bare["usage"]["prompt_tokens"] < usual["usage"]["prompt_tokens"]


def test_keys_of_round_trips() -> None:
    answer = {
        "role": "assistant", "content": "x", "refusal": None, "annotations": [],
        "provider_specific_fields": {"a": 1}, "reasoning": "hm", "function_call": None,
    }  # fmt: skip
    expected = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    assert clean_messages([answer, *HI]) == [expected, *HI]
    assert clean_messages([{"role": "assistant", "content": None}])[0]["content"] == ""
    assert clean_messages([{"role": "assistant", "content": "x", "prefix": False}]) == [
        {"role": "assistant", "content": "x"}
    ]
    refusal = {"role": "assistant", "content": None, "refusal": "No."}
    assert clean_messages([refusal])[0] == {"role": "assistant", "content": "No."}
