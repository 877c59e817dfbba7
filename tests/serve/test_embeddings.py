"""/v1/embeddings: transformers' last_hidden_state, pooled; its shapes, and each refusal."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.errors import RequestError
from modelmill.eval.hf_reference import load_reference
from modelmill.llm import LLM
from modelmill.serve.embeddings_schema import normalize_and_encode_embedding
from tests.serve.service_thread import ServiceThread

TEXTS = [
    "Once upon a time there was a little dog",
    "Lily",
    "One day, Tom saw a big red ball in the park and ran to it.",
]


@pytest.fixture(scope="module")
def states(shared: Path, llm: LLM) -> list[torch.Tensor]:
    """transformers' last_hidden_state [T, H] of each text, float32."""
    model = load_reference(open_checkpoint(shared / "data/models/stories260K"), "float32").model
    with torch.inference_mode():
        ids = [torch.tensor([llm.language.encode_prompt(text)]) for text in TEXTS]
        return [model.model(each, use_cache=False).last_hidden_state[0] for each in ids]


def embed(running: ServiceThread, inputs: Any, status: int = 200, **more: Any) -> Any:
    response = running.post("/v1/embeddings", {"model": "stories", "input": inputs, **more})
    assert response.status == status, response.body
    return response.json


def unit(x: torch.Tensor) -> np.ndarray:
    return (x / x.norm()).numpy()


@pytest.mark.parametrize("pooling", ["mean", "last", None])
def test_equal_to_transformers_in_float32(
    running: ServiceThread, states: list[torch.Tensor], pooling: str | None
) -> None:
    more = {} if pooling is None else {"pooling": pooling}
    reply = embed(running, TEXTS, **more)
    assert [each["index"] for each in reply["data"]] == [0, 1, 2]
    for each, state in zip(reply["data"], states, strict=True):
        expected = unit(state[-1] if pooling == "last" else state.mean(0))
        np.testing.assert_allclose(
            np.array(each["embedding"], dtype=np.float32), expected, rtol=0, atol=2e-6
        )
    # one after another, in the other form, from the ids
    for text, each in zip(TEXTS, reply["data"]):
        (alone,) = embed(running, text, encoding_format="base64", **more)["data"]
        vector = np.frombuffer(base64.b64decode(alone["embedding"]), dtype="<f4")
        np.testing.assert_allclose(vector, each["embedding"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_python_gets_the_same(
    running: ServiceThread, llm: LLM, states: list[torch.Tensor], pooling: str
) -> None:
    vectors = llm.embed(TEXTS, pooling=pooling)
    expected = [unit(state[-1] if pooling == "last" else state.mean(0)) for state in states]
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=2e-6)
    served = [
        each["embedding"] for each in embed(running, TEXTS, pooling=pooling, dimensions=16)["data"]
    ]
    np.testing.assert_allclose(
        llm.embed(TEXTS, pooling=pooling, dimensions=16), served, rtol=0, atol=2e-6
    )


def test_ids_are_texts(running: ServiceThread, llm: LLM) -> None:
    ids = [llm.language.encode_prompt(text) for text in TEXTS]
    texts = [each["embedding"] for each in embed(running, TEXTS)["data"]]
    np.testing.assert_allclose(
        [each["embedding"] for each in embed(running, ids)["data"]], texts, atol=1e-6
    )
    np.testing.assert_allclose(embed(running, ids[0])["data"][0]["embedding"], texts[0], atol=1e-6)


def test_shape(running: ServiceThread, llm: LLM) -> None:
    reply = embed(running, TEXTS[0])
    assert reply.keys() == {"object", "data", "model", "usage"}
    assert (reply["object"], reply["model"]) == ("list", "stories")
    (data,) = reply["data"]
    assert data.keys() == {"object", "index", "embedding"}
    assert data["object"] == "embedding"
    count = len(llm.language.encode_prompt(TEXTS[0]))
    assert reply["usage"] == {"prompt_tokens": count, "total_tokens": count}


def test_fewer_dimensions(running: ServiceThread) -> None:
    full = np.array(embed(running, TEXTS[0])["data"][0]["embedding"])
    short = np.array(embed(running, TEXTS[0], dimensions=8)["data"][0]["embedding"])
    np.testing.assert_allclose(short, full[:8] / np.linalg.norm(full[:8]), atol=1e-6)
    error = embed(running, TEXTS[0], 400, dimensions=len(full) + 1)["error"]
    assert (error["param"], error["type"]) == ("dimensions", "invalid_request_error")


def test_answers_are_bounded(running: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelmill.serve.embeddings_schema.MAX_OUTPUT_FLOATS", 150)
    assert len(embed(running, TEXTS[:2])["data"]) == 2
    assert "use base64" in embed(running, TEXTS, 400)["error"]["message"]
    assert len(embed(running, TEXTS, encoding_format="base64")["data"]) == 3


def test_many_and_long_ones(running: ServiceThread, llm: LLM) -> None:
    longest = llm.engine_core.max_model_len
    reply = embed(running, [[5] * longest, *[[i + 3, 7] for i in range(200)]])
    assert len(reply["data"]) == 201
    running.post("/v1/completions", {"model": "stories", "prompt": "x", "max_tokens": 1})
    stats = running.run(running.engine.stats())
    assert stats is not None
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)


def test_the_beginning_of_an_input_is_read(running: ServiceThread, llm: LLM) -> None:
    ids = [llm.language.encode_prompt(text) for text in TEXTS]
    for count in (1, 5, 100):
        cut = embed(running, TEXTS, truncate_prompt_tokens=count)
        same = embed(running, [each[:count] for each in ids])
        assert cut["usage"] == same["usage"]
        for one, other in zip(cut["data"], same["data"], strict=True):
            np.testing.assert_allclose(one["embedding"], other["embedding"], atol=1e-6)
        from_ids = embed(running, ids, truncate_prompt_tokens=count)
        assert from_ids["usage"] == same["usage"]
    longest = llm.engine_core.max_model_len
    long = embed(running, "a b " * 700, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == longest


def test_the_token_at_the_end_of_every_text_is_kept(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As embedding models that pool their last token need it."""
    tokenizer = llm.language.tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(tokenizer, "_suffix", [2])
    whole = tokenizer.encode(TEXTS[0])
    assert tokenizer.encode_beginning(TEXTS[0], len(whole)) == whole
    assert tokenizer.encode_beginning(TEXTS[0], 6) == [*whole[:5], 2]
    assert tokenizer.encode_beginning(TEXTS[0], 2) == [whole[0], 2]
    assert tokenizer.encode_beginning(TEXTS[0], 1) == [whole[0]]


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}, 3),
        ("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}, 3),
    ],
)
def test_texts_to_compare_are_cut_too(
    running: ServiceThread, path: str, body: dict[str, Any], count: int
) -> None:
    long = {**body, "model": "stories", "truncate_prompt_tokens": 2}
    response = running.post(path, long)
    assert response.status == 200, response.body
    assert response.json["usage"]["prompt_tokens"] == 2 * count
    assert running.post(path, {**long, "truncate_prompt_tokens": 0}).status == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "Lily"}),
        ("/v1/embeddings", {"input": [3] * 600}),
        ("/v1/score", {"text_1": "Lily", "text_2": "Tom"}),
        ("/v1/rerank", {"query": "Lily", "documents": ["Tom"]}),
        ("/v1/completions", {"prompt": "Lily", "max_tokens": 1}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
        ),
    ],
)
def test_a_cut_longer_than_the_engine_takes_is_refused(
    running: ServiceThread, path: str, body: dict[str, Any]
) -> None:
    """Also with a short text, as in vLLM: the client has the wrong idea of the engine."""
    fits = {**body, "model": "stories", "truncate_prompt_tokens": 512}
    assert running.post(path, fits).status == 200
    response = running.post(path, {**fits, "truncate_prompt_tokens": 513})
    assert response.status == 400
    error = response.json["error"]
    assert (error["message"], error["param"]) == (
        "truncate_prompt_tokens must be at most 512, this engine's length, not 513",
        "truncate_prompt_tokens",
    )


TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Who plays?"},
    {"role": "assistant", "content": "Tom"},
]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
def test_messages_are_read_through_the_chat_template(
    running: ServiceThread, more: dict[str, Any]
) -> None:
    body = {"model": "stories", "messages": TALK, **more}
    response = running.post("/v1/embeddings", body)
    assert response.status == 200, response.body
    # /tokenize begins an answer by default
    rendered = running.post("/tokenize", {"add_generation_prompt": False, **body}).json["tokens"]
    (expected,) = embed(running, [rendered])["data"]
    assert response.json["usage"]["prompt_tokens"] == len(rendered)
    np.testing.assert_allclose(
        response.json["data"][0]["embedding"], expected["embedding"], atol=1e-6
    )


def test_messages_are_cut_too(running: ServiceThread) -> None:
    body = {"model": "stories", "messages": [{"role": "user", "content": "a " * 900}]}
    response = running.post("/v1/embeddings", body)
    assert response.status == 400
    assert response.json["error"]["param"] == "messages"
    cut = running.post("/v1/embeddings", {**body, "truncate_prompt_tokens": 4})
    assert cut.json["usage"]["prompt_tokens"] == 4


def test_texts_without_special_tokens(running: ServiceThread, llm: LLM) -> None:
    ids = llm.language.encode_prompt(TEXTS[0])
    assert ids[0] == 1
    (plain,) = embed(running, TEXTS[0], add_special_tokens=False)["data"]
    (expected,) = embed(running, ids[1:])["data"]
    np.testing.assert_allclose(plain["embedding"], expected["embedding"], atol=1e-6)
    cut = embed(running, TEXTS[0], add_special_tokens=False, truncate_prompt_tokens=3)
    np.testing.assert_allclose(
        cut["data"][0]["embedding"], embed(running, ids[1:4])["data"][0]["embedding"], atol=1e-6
    )
    assert embed(running, TEXTS[0], add_special_tokens=True)["usage"]["prompt_tokens"] == len(ids)


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": TALK, "input": "a"}, "input and messages exclude each other"),
        ({"messages": []}, "messages: must have at least 1 items"),
        ({"messages": TALK, "add_special_tokens": True}, "add_special_tokens has no effect"),
        ({"messages": TALK[:1], "continue_final_message": True}, "continue_final_message needs a"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt needs messages"),
        ({"input": "a", "continue_final_message": True}, "continue_final_message needs messages"),
        (
            {"messages": TALK, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message and add_generation_prompt exclude",
        ),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages: pictures are not"),
        ({"messages": [TALK]}, "messages[0]: must be an object"),
    ],
)
def test_refusals_of_messages(running: ServiceThread, body: dict[str, Any], message: str) -> None:
    response = running.post("/v1/embeddings", {"model": "stories", **body})
    assert response.status == 400, response.body
    error = response.json["error"]
    assert error["message"].startswith(message)
    assert error["param"] == re.split(r"[ :\[]", message)[0]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_cut_to_max_tokens_per_doc(
    running: ServiceThread, llm: LLM, path: str
) -> None:
    body = {"model": "stories", "query": TEXTS[0], "documents": [TEXTS[2], TEXTS[1]]}

    def rank(**more: Any) -> Any:
        response = running.post(path, {**body, **more})
        assert response.status == 200, response.body
        return response.json

    lengths = [len(llm.language.encode_prompt(text)) for text in (TEXTS[0], TEXTS[2], TEXTS[1])]
    whole = rank()
    assert whole["usage"]["prompt_tokens"] == sum(lengths)
    for none in (0, None, 400):
        same = rank(max_tokens_per_doc=none)
        assert (same["results"], same["usage"]) == (whole["results"], whole["usage"])
    cut = rank(max_tokens_per_doc=2)
    # the query is read whole
    assert cut["usage"]["prompt_tokens"] == lengths[0] + 2 + 2
    vectors = embed(running, [llm.language.encode_prompt(text)[:2] for text in body["documents"]])
    query = np.array(embed(running, TEXTS[0])["data"][0]["embedding"])
    scores = {each["index"]: each["relevance_score"] for each in cut["results"]}
    for index, each in enumerate(vectors["data"]):
        np.testing.assert_allclose(scores[index], query @ np.array(each["embedding"]), atol=1e-5)
    assert cut["results"][0]["document"]["text"] in body["documents"]
    # both limits: the smaller one of each text
    both = rank(max_tokens_per_doc=2, truncate_prompt_tokens=3)
    assert both["usage"]["prompt_tokens"] == 3 + 2 + 2
    long = rank(max_tokens_per_doc=5, documents=["a " * 600])
    assert long["usage"]["prompt_tokens"] == lengths[0] + 5


@pytest.mark.parametrize("wrong", [-1, 1.5, 513])
def test_a_wrong_max_tokens_per_doc_is_refused(running: ServiceThread, wrong: Any) -> None:
    body = {"model": "stories", "query": "a", "documents": ["b"], "max_tokens_per_doc": wrong}
    response = running.post("/v1/rerank", body)
    assert response.status == 400
    assert response.json["error"]["param"] == "max_tokens_per_doc"


WRONG: list[tuple[Any, str]] = [
    ({"input": ""}, "input is empty"),
    ({"input": ["a", ""]}, "input[1] is empty"),
    ({"input": []}, "input is empty"),
    ({"input": [""]}, "input is empty"),
    ({"input": [[]]}, "input is empty"),
    ({"input": ["a", 1]}, "input"),
    ({"input": [-1]}, "the prompt's token ids must be between 0 and 511"),
    ({"input": [[3], [-1]]}, "input[1]: the prompt's token ids must be between 0 and 511"),
    ({"input": [1 << 40]}, "the prompt's token ids must be between 0 and 511"),
    ({"input": [1 << 20]}, "token ids must be between"),
    ({"input": [True]}, "input"),
    ({"input": None}, "input"),
    ({"input": [3] * 513}, "tokens, this engine takes"),
    ({"input": "a " * 5000}, "this engine takes 512 tokens"),
    ({"input": [[3]] * 2049}, "the limit is 2048"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 1.5}, "dimensions"),
    ({"input": "a", "pooling": "max"}, "pooling"),
    ({"input": "a", "odd": 1}, "unknown field"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({}, "field required"),
]


LONG_TEXT, LONG_IDS = "a " * 600, [3] * 600


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/embeddings", {"input": ["a", "b", LONG_TEXT]}, "input[2]: the prompt has"),
        ("/v1/embeddings", {"input": [[3], LONG_IDS]}, "input[1]: the prompt has"),
        ("/v1/embeddings", {"input": [[3], [1 << 20]]}, "input[1]: the prompt's token ids"),
        ("/api/embed", {"input": ["a", LONG_TEXT], "truncate": False}, "input[1]: the prompt has"),
        ("/v1/completions", {"prompt": [[3], LONG_IDS]}, "prompt[1]: the prompt has"),
        ("/v1/rerank", {"query": LONG_TEXT, "documents": ["a"]}, "query: the prompt has"),
        ("/v1/rerank", {"query": "a", "texts": ["a", {"text": LONG_TEXT}]}, "texts[1]: the prompt"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", "b", LONG_TEXT]}, "text_2[2]: the prompt"),
        ("/v1/score", {"queries": LONG_TEXT, "documents": ["a"]}, "queries: the prompt has"),
    ],
)
def test_of_several_texts_the_wrong_one_is_named(
    running: ServiceThread, path: str, body: dict[str, Any], name: str
) -> None:
    response = running.post(path, {"model": "stories", **body})
    assert response.status == 400, response.body
    assert response.error_message.startswith(name)
    if not isinstance(error := response.json["error"], str):
        assert error["param"] == re.split(r"[\[:]", name)[0]


@pytest.mark.parametrize(("body", "message"), WRONG, ids=lambda value: str(value)[:50])
def test_refusals(running: ServiceThread, body: Any, message: str) -> None:
    response = running.post("/v1/embeddings", {"model": "stories", **body})
    assert response.status == 400, response.body
    error = response.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert message in error["message"]


def test_other_models(running: ServiceThread) -> None:
    assert embed(running, "a", 404, model="nobody")["error"]["code"] == "model_not_found"


def test_a_state_without_a_direction_is_refused() -> None:
    with pytest.raises(RequestError, match="without a direction"):
        normalize_and_encode_embedding(np.zeros(4, dtype="<f4").tobytes(), None, False)
    assert normalize_and_encode_embedding(np.array([3, 4], dtype="<f4").tobytes(), 1, False) == [
        1.0
    ]
