"""Hostile requests to a served engine: refused at once in OpenAI's form, and the engine goes on."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from modelmill.serve import json_logs
from modelmill.text.chat_format_loader import TemplateChatFormat
from tests.serve.asgi_client import Client
from tests.serve.service_thread import ServiceThread
from tests.trust.error_lines import check_one_line
from tests.wait import time_limit, wait_until

COMPLETION = {"model": "stories", "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
CHAT = {
    "model": "stories",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 4,
    "temperature": 0,
}


@pytest.fixture(autouse=True)
def _alive_afterwards(running: ServiceThread) -> Iterator[None]:
    """After any request: the worker is the same, nothing runs, every page is free, and the next
    request is served.
    """
    pid = running.engine.pid
    yield
    assert running.engine.pid == pid
    idle(running)
    assert running.post("/v1/completions", COMPLETION).status == 200
    assert running.service.num_active == 0


def idle(running: ServiceThread) -> None:
    def empty() -> bool:
        stats = running.run(running.engine.stats())
        assert stats is not None
        return (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)

    wait_until(empty, describe=lambda: running.run(running.engine.stats()))


def refusal(
    running: ServiceThread, path: str, body: Any, status: int = 400, **options: Any
) -> dict[str, Any]:
    """The error of a request that must fail, after checking its form."""
    with time_limit():
        response = running.post(path, body, **options)
    assert response.status == status, response.body[:500]
    assert response.json.keys() == {"error"}
    error: dict[str, Any] = response.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    check_one_line(Exception(error["message"]))
    return error


HOSTILE: list[tuple[str, Any]] = [
    ("n", 10**9), ("n", 0), ("n", -1), ("n", 1.5), ("n", True), ("n", "2"), ("n", 10**100),
    ("best_of", 10**6), ("best_of", 2), ("logprobs", 10**6), ("logprobs", -1), ("logprobs", True),
    ("logit_bias", {str(i): 1.0 for i in range(10**4)}), ("logit_bias", {"999999": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}), ("logit_bias", {"1": 1e9}), ("logit_bias", {"1": "1"}),
    ("logit_bias", [1]),
    ("stop", ["a"] * 10**4), ("stop", [""]), ("stop", ""), ("stop", [1]), ("stop", "x" * 10**5),
    ("stop", ["x" * 5000]),
    ("stop_token_ids", [10**9]), ("stop_token_ids", [-1]), ("stop_token_ids", list(range(1000))),
    ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", ""]), ("prompt", [[1], []]),
    ("prompt", None),
    ("prompt", [10**9]), ("prompt", [-1]), ("prompt", [2**70]), ("prompt", [1.5]),
    ("prompt", ["a", 1]), ("prompt", {}),
    ("prompt", [[[1]]]), ("prompt", [True]), ("prompt", ["a"] * 5000), ("prompt", [5] * 513),
    ("prompt", [5] * 10**5),
    ("temperature", -1), ("temperature", "0.7"), ("temperature", True), ("temperature", 1e300),
    ("temperature", []),
    ("top_p", -0.1), ("top_p", 1.5), ("top_p", "0"), ("top_k", -2), ("top_k", 2**40), ("min_p", 2),
    ("seed", 2**80),
    ("seed", 1.5), ("max_tokens", -2), ("max_tokens", 2**40), ("max_tokens", "4"),
    ("min_tokens", 5), ("suffix", "x"),
    ("seed", -(2**63) - 1), ("stop_token_ids", [True]), ("max_tokens", 4.0), ("prompt", [5.0]),
    ("logit_bias", {"１": 1}),
    ("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", -3),
    ("stream", "true"), ("stream", 1),
    ("stream_options", {"include_usage": True}), ("cache_salt", "x" * 5000), ("cache_salt", 1),
    ("model", 1), ("no_such_field", 1), ("chat_template", "{{ 1 }}"), ("user", 1), ("echo", "yes"),
    ("", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    "place", range(len(HOSTILE)), ids=lambda place: f"{HOSTILE[place][0]}-{place}"
)
def test_hostile_values(running: ServiceThread, place: int) -> None:
    name, value = HOSTILE[place]
    error = refusal(running, "/v1/completions", {**COMPLETION, name: value})
    assert error["type"] == "invalid_request_error"


DEEP = b'{"a":' * 10**4 + b"1" + b"}" * 10**4
START = b'{"model":"stories","prompt":"a","temperature":'


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"1", b'"x"', b"{", b"\xff\xfe", b"{}", b"[" * 10**5, DEEP,
        *(START + value + b"}" for value in (b"NaN", b"1e400", b"-Infinity", b"9" * 5000)),
    ],
    ids=range(14),
)  # fmt: skip
def test_bodies_that_are_no_requests(running: ServiceThread, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        refusal(running, path, body)


@pytest.mark.parametrize(
    "ids", [[512], [10**9], [2**31], [2**70], [-1], [True], [1.0], ["5"], "5", None, [[5]]], ids=str
)
def test_ids_that_stand_for_no_text(running: ServiceThread, ids: Any) -> None:
    """The vocabulary ends at 512."""
    refusal(running, "/detokenize", {"tokens": ids})
    assert running.post("/detokenize", {"tokens": [511]}).status == 200


@pytest.mark.parametrize(
    "content_type",
    ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"],
)
def test_a_body_without_the_json_content_type(running: ServiceThread, content_type: str) -> None:
    """What a page of another origin can send without asking is refused, and the answer says what is
    missing.
    """
    for path, body in (
        ("/v1/completions", COMPLETION),
        ("/v1/chat/completions", CHAT),
        ("/tokenize", {"prompt": "x"}),
    ):
        answer = running.run(
            running.client.post(path, body, headers={"content-type": content_type})
        )
        assert answer.status == 400
        assert "content-type: application/json" in answer.json["error"]["message"]


def test_halves_of_a_surrogate_pair_come_back_as_question_marks(running: ServiceThread) -> None:
    """JSON can hold them, UTF-8 cannot: a response that repeats a field replaces them, and no model
    reads a text that has them.
    """
    half = "a\ud800"
    ask = {"model": "stories", "input": "hello", "max_output_tokens": 3, "safety_identifier": half}
    reply = running.post("/v1/responses", ask)
    assert reply.status == 200, reply.body
    assert reply.json["safety_identifier"] == "a?"
    streamed = running.post("/v1/responses", {**ask, "stream": True})
    assert b"response.completed" in streamed.body or b"response.incomplete" in streamed.body
    for body in (
        {**COMPLETION, half: 1},
        {**COMPLETION, "prompt": half},
        {**COMPLETION, "suffix": half},
        {**CHAT, "messages": [{"role": "user", "content": half}]},
        {**CHAT, "messages": [{half: 1}]},
    ):
        refusal(running, "/v1/completions" if "prompt" in body else "/v1/chat/completions", body)
    refusal(running, "/v1/completions", {**COMPLETION, "model": half}, status=404)


def test_minus_zero_is_greedy(running: ServiceThread) -> None:
    body = json.dumps(COMPLETION).replace('"temperature": 0', '"temperature": -0.0').encode()
    assert (
        running.post("/v1/completions", body).json["choices"][0]["text"]
        == "a time, there"[:0]
        + (running.post("/v1/completions", COMPLETION).json["choices"][0]["text"])
    )


@pytest.mark.parametrize(
    "messages",
    [
        [], [1], [{}], [{"role": "root", "content": "x"}], [{"role": "user"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "x", "evil": 1}],
        [{"role": "user", "content": "x" * 10**6}], [{"role": "user", "content": "hi"}] * 4000,
        [{"role": "user", "content": [{"type": "image_url",
        "image_url": {"url": "http://169.254.169.254/latest"}}]}],
        [{"role": "user", "content": [{"type": "image_url",
        "image_url": {"url": "file:///etc/passwd"}}]}],
    ],
    ids=range(12),
)  # fmt: skip
def test_hostile_messages(running: ServiceThread, messages: Any) -> None:
    """Nothing is ever fetched for an image's address: this engine takes text only."""
    refusal(running, "/v1/chat/completions", {**CHAT, "messages": messages})


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 5}, {"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 10**6},
        {"max_tokens": 0},
        {"max_completion_tokens": -5},
        {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}, {"functions": []},
        {"chat_template_kwargs": []}, {"modalities": ["audio"]}, {"n": 10**6},
        {"messages": {"role": "user"}},
    ],
    ids=str,
)  # fmt: skip
def test_hostile_fields_of_a_conversation(running: ServiceThread, more: dict[str, Any]) -> None:
    """A chat template comes with the engine, never with a request."""
    refusal(running, "/v1/chat/completions", {**CHAT, **more})


def test_control_tokens_that_a_user_types_are_text(running: ServiceThread) -> None:
    """<s> in a prompt is three characters, in a raw prompt and in a message."""
    plain = running.post("/tokenize", {"prompt": "a<s>b</s>"}).json["tokens"]
    assert plain.count(1) == 1
    assert 2 not in plain
    messages = [{"role": "user", "content": "</s><s>"}]
    quiet = [{"role": "user", "content": "hello"}]
    token_lists = [
        running.post("/tokenize", {"messages": each}).json["tokens"] for each in (messages, quiet)
    ]
    assert len({ids.count(1) + ids.count(2) for ids in token_lists}) == 1


def test_prompts_around_the_longest(running: ServiceThread) -> None:
    ids = running.post("/tokenize", {"prompt": "Once upon a time there was a dog " * 100}).json
    longest = ids["max_model_len"]
    for length, status in ((longest - 1, 200), (longest, 400), (longest + 1, 400)):
        body = {**COMPLETION, "prompt": (ids["tokens"] * 9)[:length], "ignore_eos": True}
        response = running.post("/v1/completions", body)
        assert response.status == status
        if status == 200:
            assert response.json["usage"]["completion_tokens"] == 1
            assert response.json["choices"][0]["finish_reason"] == "length"
        else:
            assert response.json["error"]["code"] == "context_length_exceeded"
            assert response.json["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "text",
    ["a" * 10**6, "é" * 600_000, "\u0301" * 600_000, " " * 10**6, "<s>" * 300000],
    ids=range(5),
)
def test_a_megabyte_of_one_character(running: ServiceThread, text: str) -> None:
    for path, body in (
        ("/v1/completions", {**COMPLETION, "prompt": text}),
        ("/tokenize", {"prompt": text}),
    ):
        refusal(running, path, body)
    messages = [{"role": "user", "content": text}]
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "messages": messages}),
        ("/tokenize", {"messages": messages}),
    ):
        refusal(running, path, body)


def test_many_messages_are_measured_together(running: ServiceThread) -> None:
    """Each would fit, and all of them took 13 s to be split into seven million tokens."""
    parts = [{"type": "text", "text": "é" * 1500}] * 1500
    for content in (parts, "é" * 1500):
        messages = [{"role": "user", "content": content}] * (1 if content is parts else 1500)
        for path, body in (
            ("/v1/chat/completions", {**CHAT, "messages": messages}),
            ("/tokenize", {"messages": messages}),
        ):
            assert "characters" in refusal(running, path, body)["message"]


def function(**more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **more}}]


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


LONG = "the cat sat on a mat. " * 20_000
HIDDEN: dict[str, dict[str, Any]] = {
    "arguments": {
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": LONG}}
        ]
    },
    "arguments as an object": {
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": {LONG: 1}}}}]
    },
    "numbers": {"tool_calls": [{"function": {"name": "f", "arguments": {"a": [7] * 100_000}}}]},
    "thoughts": {"content": "x", "reasoning_content": LONG},
    "a name": {"content": "x", "name": LONG},
}


@pytest.mark.parametrize("message", HIDDEN.values(), ids=HIDDEN)
def test_whatever_a_template_may_write_is_measured(
    running: ServiceThread, message: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only a message's content: nothing of it is rendered."""
    monkeypatch.setattr(TemplateChatFormat, "render_pieces", None)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", **message}]
    for path, body, code in (
        ("/v1/chat/completions", {**CHAT, "messages": messages}, "context_length_exceeded"),
        ("/tokenize", {"messages": messages}, 400),  # llama.cpp's form
    ):
        error = refusal(running, path, body)
        assert (error["code"], error["param"]) == (code, "messages")


@pytest.mark.parametrize(
    "body",
    [
        {"description": LONG[:60_000]},
        {"parameters": {"enum": ["x" * 20_000]}},
        {"parameters": {"enum": [1] * 20_000}},
    ],
)
def test_tools_are_measured_too(
    running: ServiceThread, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TemplateChatFormat, "render_pieces", None)
    error = refusal(running, "/v1/chat/completions", {**CHAT, "tools": function(**body)})
    assert error["code"] == "context_length_exceeded"
    flat = {"type": "function", **function(**body)[0]["function"]}
    refusal(running, "/v1/responses", {"model": "stories", "input": "x", "tools": [flat]})


def test_a_deep_message_is_refused_for_what_it_is(running: ServiceThread) -> None:
    messages = [{"role": "user", "content": "x", "name": nested(300)}]
    assert (
        "nested"
        in refusal(running, "/v1/chat/completions", {**CHAT, "messages": messages})["message"]
    )


def test_texts_to_embed_are_counted_before_they_are_split(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.engine.text_processor, "request", None)
    inputs = ["a"] * (running.engine.sequence_capacity + 1)
    error = refusal(running, "/v1/embeddings", {"model": "stories", "input": inputs})
    assert f"more than the {running.engine.sequence_capacity}" in error["message"]


def test_a_full_engine_makes_nothing_of_a_request(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has to be refused is not rendered and not split."""
    engine = running.engine
    monkeypatch.setattr(engine.generation_client, "num_sequences", engine.sequence_capacity)
    for name in ("request", "chat_request"):
        monkeypatch.setattr(running.engine.text_processor, name, None)
    for path, body in (
        ("/v1/completions", COMPLETION),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"model": "stories", "input": "x"}),
        ("/v1/embeddings", {"model": "stories", "input": ["x"]}),
    ):
        assert refusal(running, path, body, 429)["code"] == "rate_limit_exceeded"


def test_bodies_that_are_too_large(running: ServiceThread) -> None:
    most = running.service.limits.max_body_bytes
    error = refusal(
        running, "/v1/completions", b" " * 10, 413, headers={"content-length": str(most + 1)}
    )
    assert error["code"] == "request_too_large"
    # a length that lies, or none at all: counted as it comes
    refusal(running, "/v1/completions", b" " * (most + 1), 413, headers={"content-length": "10"})
    for length in ("-5", "9" * 30, "9" * 5000, "0x10", "1_0", "+5", " 5", "\u00b2", ""):
        refusal(running, "/v1/completions", b"{}", 413, headers={"content-length": length})
    for length in ("0" * 30 + "2", "0" * 5000 + "2"):
        refusal(running, "/v1/completions", b"{}", 400, headers={"content-length": length})


def guarded(running: ServiceThread, *keys: str, **limits: Any) -> Client:
    """Another door to the same engine, with keys."""
    return running.limited_client(api_keys=keys, **limits)


PATHS = [
    *(
        "/v1/models",
        "/metrics",
        "/version",
        "/openapi.json",
        "/page/",
        "/nothing",
        "/health/",
        "//health",
        "/health/x",
    ),
    *("/v1/../health", "/health;x", "/HEALTH"),
]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_but_health_needs_a_key(running: ServiceThread, path: str) -> None:
    client = guarded(running, "sesame", "other-key")
    for headers in (
        {}, {"authorization": "Bearer"}, {"authorization": "Bearer wrong"},
        {"authorization": "sesame"},
        {"authorization": "Basic sesame"}, {"authorization": "Bearer sesam"},
        {"authorization": "Bearer sesame2"},
        {"x-forwarded-for": "127.0.0.1"}, {"authorization": "Bearer \u00e9"},
    ):  # fmt: skip
        response = running.run(client.get(path, headers=headers))
        assert response.status == 401, headers
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json["error"]["code"] == "invalid_api_key"
    for method in ("OPTIONS", "HEAD", "TRACE", "PUT", "DELETE", "CONNECT"):
        assert running.run(client.call(method, path)).status == 401, method
    for key in ("sesame", "other-key"):
        assert (
            running.run(client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status
            == 200
        )
    assert running.run(client.get("/health")).status == 200


@pytest.mark.parametrize(
    "raw",
    ["/v1%2fmodels", "/%76%31/models", "//v1/models", "http://localhost/v1/models", "/health%2f"],
)
def test_no_way_around_the_key_by_spelling(running: ServiceThread, raw: str) -> None:
    """The raw path decides, whatever the decoded one says."""
    client = guarded(running, "sesame")
    for path in ("/health", "/v1/models", raw):
        assert running.run(client.get(path, raw=raw)).status == 401


def test_the_host_of_a_whole_url_counts(running: ServiceThread) -> None:
    """RFC 9112, 3.2.2: the header Host is ignored then, also where it is one of this machine."""
    url = "http://evil.example/v1/models"
    assert running.get(url).status == 403
    assert running.get("http://localhost/v1/models", headers={"host": "evil.example"}).status == 200
    assert running.get("http://localhost@evil.example/v1/models").status == 400
    client = guarded(running, "sesame")
    assert running.run(client.get("http://localhost/v1/models")).status == 401
    assert running.run(client.get("http://localhost/health")).status == 200


def test_keys_are_compared_in_constant_time(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every key is compared, by hmac.compare_digest over digests of one length, also after one has
    matched.
    """
    import hmac

    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes, real: Any = hmac.compare_digest) -> bool:
        compared.append((len(a), len(b)))
        return bool(real(a, b))

    monkeypatch.setattr("modelmill.serve.middleware.hmac.compare_digest", compare)
    client = guarded(running, "one", "a much longer key", "three")
    running.run(client.get("/version", headers={"authorization": "Bearer one"}))
    assert compared == [(32, 32)] * 3


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "evil.example:8000", "127.0.0.1.nip.io"]
)
def test_without_a_key_a_foreign_name_is_refused(running: ServiceThread, host: str) -> None:
    """A page of the web that resolves its own name to this machine gets nothing (DNS rebinding)."""
    assert running.get("/v1/models", headers={"host": host}).status == 403
    for fine in (
        "localhost",
        "localhost:8000",
        "127.0.0.1:80",
        "[::1]:8000",
        "LOCALHOST",
        "localhost.",
        "localhost:",
    ):
        assert running.get("/version", headers={"host": fine}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost:80@evil.com", "evil.com@localhost", "localhost:80:80", "localhost:x",
        "localhost:-1",
        "localhost:+80", "localhost:65536", "localhost:099999", "localhost/", "localhost?x",
        "localhost#x",
        "localhost\\evil.com",
        "http://localhost", "local host", " localhost", "localhost ", "localhost,evil.com",
        "[localhost]", "[::1",
        "::1]", "::1", "[::1]x", "[::1]:80x", "[[::1]]", "[]", ":80", ":", "[::1%]", "localhost\t",
        "l\u00f6calhost",
        "localhost\u0000", "%6cocalhost", "\uff41.com",
    ],
)  # fmt: skip
def test_what_is_no_host_is_refused(running: ServiceThread, host: str) -> None:
    """With a key or without: one program's reading of it is not another's."""
    assert running.get("/version", headers={"host": host}).status == 400
    client = guarded(running, "k")
    assert (
        running.run(
            client.get("/version", headers={"host": host, "authorization": "Bearer k"})
        ).status
        == 400
    )


def test_keys_share_no_cache_unless_they_may(running: ServiceThread) -> None:
    """cached_tokens would reveal to one key, page by page, the prompts of another."""
    text = "Ben had a small green boat and he went to the lake to sail with his friend Sue " * 2
    messages = [{"role": "user", "content": text}]
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": "x"}, *messages], "max_tokens": 1},
        ),
        ("/v1/responses", {"input": text, "max_output_tokens": 1}),
    ]

    def door(**limits: Any) -> Client:
        return guarded(running, "one", "two", **limits)

    def count_cached(client: Client, key: str, path: str, body: dict[str, Any]) -> int:
        headers = {"authorization": f"Bearer {key}"}
        usage = running.run(client.post(path, {"model": "stories", **body}, headers=headers)).json[
            "usage"
        ]
        return int(
            (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"]
        )

    apart, shared = door(), door(share_cache=True)
    for path, body in requests:
        for more in ({}, {"cache_salt": "mine"}):
            counts = [
                count_cached(apart, key, path, {**body, **more})
                for key in ("one", "two", "one", "two")
            ]
            assert counts[:2] == [0, 0], (path, more, counts)
            assert min(counts[2:]) > 0, (path, more, counts)
    path, body = requests[0]
    body = {**body, "prompt": f"Then {text}"}
    assert count_cached(shared, "one", path, body) == 0
    assert count_cached(shared, "two", path, body) > 0
    assert count_cached(shared, "two", path, {**body, "cache_salt": "mine"}) == 0


def test_other_origins_get_no_permission_unless_named(running: ServiceThread) -> None:
    cors_headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    assert (
        "access-control-allow-origin" not in running.get("/version", headers=cors_headers).headers
    )
    client = guarded(running, "k", allowed_origins=("https://page.example",))
    assert running.run(client.call("OPTIONS", "/v1/models", headers=cors_headers)).status == 200
    other = running.run(
        client.call(
            "OPTIONS", "/v1/models", headers={**cors_headers, "origin": "https://other.example"}
        )
    )
    assert "access-control-allow-origin" not in other.headers
    response = running.run(
        client.get("/health", headers={"origin": "https://page.example"})
    ).headers
    assert response["access-control-expose-headers"] == "X-Request-Id, Request-Id, Retry-After"


def test_a_salt_keeps_tenants_apart(running: ServiceThread) -> None:
    """What one salt cached, another does not find: neither in the counts nor, so, in the time."""
    body = {
        **COMPLETION,
        "prompt": "Lily and Tom went to the park to play with the big red ball " * 3,
    }

    def count_cached(salt: str) -> int:
        usage = running.post("/v1/completions", {**body, "cache_salt": salt}).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert count_cached("tenant a") == 0
    assert count_cached("tenant a") > 0
    assert count_cached("tenant b") == 0


def test_a_bug_tells_nothing_of_itself(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("address 0x7f00 of the user's secret prompt")

    monkeypatch.setattr(TemplateChatFormat, "render_pieces", broken)
    error = refusal(running, "/v1/chat/completions", CHAT, 500)
    assert "0x7f00" not in json.dumps(error)
    record = next(record for record in caplog.records if record.getMessage() == "bug")
    line = json_logs.JsonLogFormatter().format(record)
    assert "0x7f00" not in line
    assert json.loads(line)["error"] == "RuntimeError"


def test_logs_hold_neither_prompts_nor_answers_nor_keys(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(json_logs.JsonLogFormatter())
    logger = logging.getLogger("modelmill")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logging.getLogger("modelmill.serve.access")._cache.clear()  # type: ignore[attr-defined]
    client = guarded(running, "sesame")
    headers = {"authorization": "Bearer sesame"}
    secret = "xylophone"
    responses = running.run(
        client.post("/v1/completions", {**COMPLETION, "prompt": secret}, headers=headers)
    ).json
    running.run(
        client.post(
            "/v1/completions",
            {**COMPLETION, "prompt": secret, "temperature": secret},
            headers=headers,
        )
    )
    running.run(client.get("/version", headers={"authorization": "Bearer open-sesame"}))
    log = stream.getvalue()
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["status"] for line in lines] == [200, 400, 401]
    assert lines[0]["completion_tokens"] == 4
    for private in (secret, "sesame", responses["choices"][0]["text"]):
        assert private not in log


def test_a_bug_in_the_middle_of_a_stream_tells_nothing_of_itself(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("address 0x7f00 of the user's secret prompt")

    monkeypatch.setattr(
        "modelmill.serve.routes.completions.CompletionResponseBuilder._delta_event", broken
    )
    answer = running.post("/v1/completions", {**COMPLETION, "stream": True})
    monkeypatch.undo()
    assert answer.status == 200
    assert [list(event) for event in answer.events] == [["error"]]
    assert b"0x7f00" not in answer.body
    records = [record for record in caplog.records if record.exc_info]
    assert records
    assert not any("0x7f00" in json_logs.JsonLogFormatter().format(record) for record in records)


def test_an_unawaited_task_is_logged_without_its_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a handler for asyncio's log, Python prints the exception with its text."""

    async def failing_task() -> None:
        raise RuntimeError("the user's secret prompt")

    async def main() -> None:
        asyncio.get_running_loop().call_soon(str.encode, "the user's secret prompt", "no-such-code")
        task = asyncio.create_task(failing_task())
        while not task.done():
            await asyncio.sleep(0)

    with json_logs.log_to_stderr("info"):
        asyncio.run(main())
        gc.collect()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {line["error"] for line in lines} == {"RuntimeError", "LookupError"}
    assert not any("secret" in json.dumps(line) for line in lines)


@contextmanager
def given_up(running: ServiceThread, max_tokens: int) -> Iterator[None]:
    """Within it, outputs of so many tokens are requested and aborted: few of them may ever be
    computed.
    """

    def computed() -> int:
        stats = running.run(running.engine.stats())
        assert stats is not None
        return stats.output_tokens

    before = computed()
    yield
    idle(running)
    assert computed() - before < max_tokens / 5


async def leave(client: Client, place: int) -> None:
    """Begin a stream and go away before, at or after its first events."""
    body = {**COMPLETION, "max_tokens": 400, "ignore_eos": True, "n": 1 + place % 3, "stream": True}
    async with aclosing(client.parts("POST", "/v1/completions", body)) as parts:  # type: ignore[type-var]
        num_parts = 0
        async for _ in parts:
            num_parts += 1
            if num_parts > place % 5:
                break


def test_clients_that_leave_in_the_middle(running: ServiceThread) -> None:
    """Two hundred, streamed; and some that wait for a whole answer."""

    async def many() -> None:
        # few at once: limits what is computed without a client after a stall
        for begin in range(0, 200, 20):
            await asyncio.gather(
                *(leave(running.client, place) for place in range(begin, begin + 20))
            )
        request_body = {**COMPLETION, "max_tokens": 400, "ignore_eos": True}
        tasks = [asyncio.create_task(first_part(running.client, request_body)) for _ in range(20)]
        await asyncio.gather(*tasks)

    async def first_part(client: Client, body: Any) -> None:
        parts = client.parts("POST", "/v1/completions", body)
        waiting = asyncio.ensure_future(anext(parts))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await parts.aclose()  # type: ignore[attr-defined]

    with given_up(running, max_tokens=400 * (sum(1 + place % 3 for place in range(200)) + 20)):
        running.run(many())


def test_twice_what_is_queued_at_once(running: ServiceThread) -> None:
    """All are answered: with text, or with 429 and when to come back."""
    most = running.engine.sequence_capacity

    async def burst() -> list[Any]:
        body = {**COMPLETION, "n": 8, "temperature": 1, "max_tokens": 2}
        return await asyncio.gather(
            *(running.client.post("/v1/completions", body) for _ in range(most // 4))
        )

    responses = running.run(burst())
    statuses = [response.status for response in responses]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= most // 8
    late = next(response for response in responses if response.status == 429)
    assert late.headers["retry-after"] == "1"
    assert late.json["error"]["code"] == "rate_limit_exceeded"


def test_more_answers_than_are_queued_cost_nothing(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 KB that ask for 128,000 answers were refused only when all of them had been made: 0.8 s of
    CPU and 69 MB.
    """
    made: list[Any] = []
    monkeypatch.setattr(
        "modelmill.serve.routes.completions.completion_request_states",
        lambda *parts: made.append(parts),
    )
    for prompts, n in ((1000, 128), (1024, 1), (running.engine.sequence_capacity + 1, 1), (5, 128)):
        error = refusal(
            running, "/v1/completions", {**COMPLETION, "n": n, "prompt": ["a"] * prompts}
        )
        assert f"{prompts * n} sequences in one request" in error["message"]
    assert not made
    monkeypatch.undo()
