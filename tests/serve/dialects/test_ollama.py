"""Ollama's API: conversions, lines of JSON, options, embeddings, the lists of models, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelmill import __version__
from modelmill.core.errors import RequestError
from modelmill.serve.completion_schema import CompletionRequest
from modelmill.serve.dialects.ollama_answer import OllamaAnswerBuilder, PlainTextSplitter
from modelmill.serve.dialects.ollama_options import IGNORED_OPTIONS, OllamaOptions
from modelmill.serve.dialects.ollama_schema import OllamaGenerateRequest, to_chat_messages
from tests.serve.service_thread import ServiceThread

HI = [{"role": "user", "content": "Hi"}]
OPTIONS = {"temperature": 0, "num_predict": 5}
ASK: dict[str, Any] = {"model": "stories", "messages": HI, "options": OPTIONS}


def lines(body: bytes) -> list[Any]:
    return [json.loads(line) for line in body.decode().splitlines()]


def test_messages_become_chat_messages() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    other = {"function": {"name": "g", "arguments": {}}}
    messages = [
        {"role": "user", "content": "look", "images": ["iVBORw0", "/9j/4AA"]},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, other]},
        {"role": "tool", "tool_name": "g", "content": "second"},
        {"role": "tool", "content": "first"},
    ]
    chat = to_chat_messages(messages)
    urls = [part["image_url"]["url"] for part in chat[0]["content"][:2]]
    assert urls == ["data:image/png;base64,iVBORw0", "data:image/jpeg;base64,/9j/4AA"]
    assert chat[1]["content"] is None
    assert chat[1]["reasoning_content"] == "hm"
    ids = [each["id"] for each in chat[1]["tool_calls"]]
    assert [chat[2]["tool_call_id"], chat[3]["tool_call_id"]] == ids[::-1]
    assert json.loads(chat[1]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


def test_options_become_sampling_fields() -> None:
    options = OllamaOptions.model_validate(
        {
            "num_predict": -1, "temperature": 0.5, "top_k": 3, "top_p": 0.0, "seed": -1,
            "stop": ["x"], "repeat_penalty": 1.0, "repeat_last_n": 64, "mirostat": 0, "num_ctx": 64,
        }
    )  # fmt: skip
    assert options.sampling_fields() == {
        "temperature": 0.5, "top_k": 3, "top_p": 0.0, "stop": ["x"], "repetition_penalty": 1.0,
    }  # fmt: skip
    assert set(IGNORED_OPTIONS) <= set(OllamaOptions.model_fields)


def test_the_lines_of_a_stream(running: ServiceThread) -> None:
    response = running.post("/api/chat", ASK)
    assert response.headers["content-type"].startswith("application/x-ndjson")
    *parts, last = lines(response.body)
    assert all(part["message"]["role"] == "assistant" and not part["done"] for part in parts)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 5)
    spent = last["prompt_eval_duration"] + last["eval_duration"]
    assert 0 < spent <= last["total_duration"]
    assert last["created_at"].endswith("Z")
    whole = running.post("/api/chat", {**ASK, "stream": False}).json
    assert whole["message"]["content"] == "".join(part["message"]["content"] for part in parts)


@pytest.mark.parametrize(
    ("is_chat", "content"),
    [(True, {"message": {"role": "assistant", "content": ""}}), (False, {"response": ""})],
)
def test_a_sign_of_life_is_a_line_without_text(is_chat: bool, content: dict[str, Any]) -> None:
    """As while the arguments of a call are written, which are sent as a whole."""
    parts: Any = None
    answer = OllamaAnswerBuilder("m", PlainTextSplitter(), parts, parts, is_chat=is_chat)
    (line,) = lines(answer.keepalive())
    assert {**line, "created_at": ""} == {"model": "m", "created_at": "", **content, "done": False}


def test_generate_is_a_chat_of_one_message(running: ServiceThread) -> None:
    ask = {"model": "stories:latest", "prompt": "Hi", "options": OPTIONS, "stream": False}
    whole = running.post("/api/generate", ask).json
    assert (
        whole["response"]
        == running.post("/api/chat", {**ASK, "stream": False}).json["message"]["content"]
    )
    parts = lines(running.post("/api/generate", {**ask, "stream": True}).body)
    assert "".join(part["response"] for part in parts) == whole["response"]
    system = running.post("/api/generate", {**ask, "system": "Be kind."}).json
    assert system["prompt_eval_count"] > whole["prompt_eval_count"]


def test_requests_without_a_prompt_load(running: ServiceThread) -> None:
    loaded = lines(running.post("/api/generate", {"model": "stories"}).body)
    assert [(each["done"], each["done_reason"]) for each in loaded] == [(True, "load")]
    body = {"model": "stories", "messages": [], "keep_alive": 0, "stream": False}
    answer = running.post("/api/chat", body).json
    assert answer["done_reason"] == "unload"
    assert answer["warnings"] == ["keep_alive: stories stays loaded: it is not of a catalogue"]


@pytest.mark.parametrize("shape", ["json", {"type": "object", "properties": {"a": {"enum": [1]}},
                                             "required": ["a"], "additionalProperties": False}],
                         ids=["json", "schema"])  # fmt: skip
def test_formats(running: ServiceThread, shape: Any) -> None:
    ask = {**ASK, "format": shape, "stream": False, "options": {**OPTIONS, "num_predict": 60}}
    text = running.post("/api/chat", ask).json["message"]["content"]
    assert text.startswith("{")
    assert shape == "json" or json.loads(text) == {"a": 1}


def test_logprobs(running: ServiceThread) -> None:
    whole = running.post("/api/chat", {**ASK, "logprobs": True, "top_logprobs": 2, "stream": False})
    assert len(whole.json["logprobs"]) == 5
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole.json["logprobs"])


def test_embeddings(running: ServiceThread) -> None:
    ask = {"model": "stories", "input": ["Once", "Then"]}
    many = running.post("/api/embed", ask).json
    reference = running.post("/v1/embeddings", ask).json
    assert many["embeddings"] == [each["embedding"] for each in reference["data"]]
    assert many["prompt_eval_count"] == reference["usage"]["prompt_tokens"]
    for nothing in ({"input": ""}, {"input": []}, {"input": None}, {}):
        loaded = running.post("/api/embed", {"model": "stories", **nothing})
        assert (loaded.status, loaded.json["embeddings"]) == (200, []), loaded.body
    for nothing in ({"prompt": ""}, {}):
        loaded = running.post("/api/embeddings", {"model": "stories", **nothing})
        assert (loaded.status, loaded.json) == (200, {"embedding": []}), loaded.body
    one = running.post("/api/embeddings", {"model": "stories", "prompt": "Once"}).json
    assert one["embedding"] == many["embeddings"][0]
    long = {"model": "stories", "input": "a b " * 700}
    assert running.post("/api/embed", long).json["prompt_eval_count"] == 512
    assert running.post("/api/embed", {**long, "truncate": False}).status == 400


def test_the_lists_of_models(running: ServiceThread) -> None:
    tags = running.get("/api/tags").json["models"]
    assert [entry["name"] for entry in tags] == ["stories", "alias"]
    assert tags[0]["details"]["family"] == "llama"
    assert tags[0]["size"] > 100_000
    assert len(tags[0]["digest"]) == 64
    running_models = running.get("/api/ps").json["models"]
    assert running_models[0]["context_length"] == 512
    shown = running.post("/api/show", {"model": "stories"}).json
    go_client = {"system": "", "template": "", "verbose": False, "options": None, "name": ""}
    assert running.post("/api/show", {"model": "stories", **go_client}).json == shown
    refused = running.post("/api/show", {"model": "stories", "system": "x"})
    assert (refused.status, refused.json["error"][:7]) == (400, "system:")
    assert shown["model_info"]["llama.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools", "embedding"]
    assert "message" in shown["template"]
    assert shown["model_info"]["general.basename"] == "stories"


def test_clients_find_an_ollama_that_is_new_enough(running: ServiceThread) -> None:
    version = running.get("/api/version").json
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4)  # GitHub Copilot's minimum
    assert version["modelmill"] == __version__
    for path in ("/", "/api/tags", "/api/version"):
        assert running.run(running.client.call("HEAD", path)).status == 200


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat"),
    ("/api/chat", {"options": {"repeat_penalty": 1.2, "repeat_last_n": 64}}, "options.repeat_la"),
    ("/api/chat", {"options": {"odd": 2}}, "options.odd"),
    ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature"),
    ("/api/chat", {"format": "yaml"}, "format"),
    ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ("/api/chat", {"tools": [{"function": {}}]}, "tools[0].function.name"),
    ("/api/chat", {"odd": 1}, "odd"),
    ("/api/generate", {"prompt": "x", "template": "{{ x }}"}, "template"),
    ("/api/generate", {"prompt": "x", "context": [1]}, "context"),
    ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("/api/show", {}, "model"),
    ("/api/embed", {"input": ["", "a"]}, "input"),
    ("/api/embed", {"input": [1]}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more", "start"), BAD, ids=range(len(BAD)))
def test_errors_have_the_form_of_the_dialect(
    running: ServiceThread, path: str, more: dict[str, Any], start: str
) -> None:
    body = {**ASK, **more} if path == "/api/chat" else {"model": "stories", **more}
    if path == "/api/show":
        body = {}
    response = running.post(path, body)
    assert response.status == 400, response.body
    assert response.json.keys() == {"error"}
    assert response.json["error"].startswith(start)


def test_an_unknown_model_and_path(running: ServiceThread) -> None:
    missing = running.post("/api/chat", {**ASK, "model": "nobody"})
    assert missing.status == 404
    assert "nobody" in missing.json["error"]
    assert running.post("/api/pull", {"model": "x"}).json == {
        "error": "there is nothing at this path"
    }


@pytest.mark.parametrize("content_type", ["", "application/x-www-form-urlencoded"])
def test_a_body_needs_no_type_except_from_a_browser(
    running: ServiceThread, content_type: str
) -> None:
    """As curl and some clients send it; a page of another origin could send it, too."""
    headers = {"content-type": content_type}
    assert running.post("/api/chat", ASK, headers=headers).status == 200
    for name, value in (("origin", "http://evil.example"), ("sec-fetch-site", "cross-site")):
        refused = running.post("/api/chat", ASK, headers={**headers, name: value})
        assert refused.status == 400
    chat = {"model": "stories", "messages": HI, "max_tokens": 1}
    assert running.post("/v1/chat/completions", chat, headers=headers).status == 400


def test_a_raw_completion_has_no_default_length_and_control_tokens() -> None:
    body = OllamaGenerateRequest.model_validate({"model": "m", "prompt": "x", "raw": True})
    completion = body.to_completion_request()
    assert completion.sampling_params().max_tokens is None
    assert completion.parse_special


@pytest.mark.parametrize("more", [{"suffix": "y"}, {}], ids=["suffix", "no chat template"])
def test_what_has_no_effect_without_a_chat_template_is_said(more: dict[str, Any]) -> None:
    def completion(**fields: Any) -> CompletionRequest:
        body = {"model": "m", "prompt": "x", **more, **fields}
        return OllamaGenerateRequest.model_validate(body).to_completion_request()

    warnings = completion(system="Be kind.", think=True).warnings
    assert [line.partition(":")[0] for line in warnings] == ["system", "think"]
    assert completion(system="", think=False).warnings == []
    with pytest.raises(RequestError, match="images have no place"):
        completion(images=["iVBOR"])


def test_top_logprobs_alone_bring_log_probabilities(running: ServiceThread) -> None:
    ask = {
        "model": "stories",
        "prompt": "x",
        "stream": False,
        "options": OPTIONS,
        "top_logprobs": 2,
    }
    for raw in (True, False):
        entries = running.post("/api/generate", {**ask, "raw": raw}).json["logprobs"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
