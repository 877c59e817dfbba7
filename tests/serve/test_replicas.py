"""Replicas without Ray: where requests go, what the front does when a replica is lost, and the
flags.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from modelmill.cli.main import run_command_line
from modelmill.cli.serve_ray import _build_and_make_message_portable
from modelmill.core.packages import install_command
from modelmill.serve import stream
from modelmill.serve.replicas.asgi_call import MAX_QUEUED_CHUNKS, call_asgi_app
from modelmill.serve.replicas.deployment import DeploymentSpec, ReplicaSpec
from modelmill.serve.replicas.prefix_affinity import PREFIX_LENGTHS, PrefixAffinity, prefix_digests
from modelmill.serve.replicas.proxy import ReplicaProxy, merge_metrics, with_middleware
from modelmill.serve.service import Service, ServiceLimits
from modelmill.serve.worker_messages import OpenEngine
from tests.serve.asgi_client import Client, Response
from tests.serve.service_thread import ServiceThread
from tests.wait import TIMEOUT_SECONDS

LONG = "You are a miller. " * 40


def chat(*texts: str, **more: Any) -> bytes:
    messages = [
        {"role": "user" if place % 2 else "system", "content": text}
        for place, text in enumerate(texts)
    ]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


# -- where a request goes


def test_beginnings_are_shared_as_far_as_prompts_are() -> None:
    one, two = prefix_digests(chat(LONG, "Why?")), prefix_digests(chat(LONG, "How?"))
    assert one
    shared = [a for a, b in zip(one, two) if a == b]
    assert shared == one[: len(shared)]
    assert len(shared) == sum(cut <= len(LONG) + 7 for cut in PREFIX_LENGTHS)
    assert prefix_digests(chat(LONG)) != prefix_digests(chat(LONG, model="other"))
    assert not set(prefix_digests(chat(LONG))) & set(prefix_digests(chat(LONG, cache_salt="mine")))
    assert not set(prefix_digests(chat(LONG))) & set(
        prefix_digests(chat(LONG, tools=[{"type": "function"}]))
    )
    assert prefix_digests(b'{"prompt": ["%s", "b"]}' % LONG.encode()) == prefix_digests(
        b'{"prompt": "%s"}' % LONG.encode()
    )


@pytest.mark.parametrize(
    "body",
    [b"", b"[", b"[]", b"3", b"{}", b'{"prompt": ""}', b'{"messages": 3}',
    b'{"messages": [3, ' b'null]}', b"[" * 10**5,
     b'{"prompt": [[1, 2]]}', b'{"input": [{"content": [{"text": 1}]}]}', b"\xff\xfe",
     b'{"prompt": "\\ud800"}'],
)  # fmt: skip
def test_beginnings_of_anything(body: bytes) -> None:
    assert len(prefix_digests(body)) <= len(PREFIX_LENGTHS)


def test_a_conversation_stays_where_it_began() -> None:
    affinity, loads = PrefixAffinity(), {"a": 0, "b": 0, "c": 0}
    homes = {}
    for messages in range(9):
        prefix = prefix_digests(chat(f"{messages} {LONG}"))
        homes[messages] = affinity.rank_replicas(prefix, loads)[0]
        affinity.record_route(prefix, homes[messages])
    assert sorted(homes.values()) == sorted("abc" * 3)
    for messages in range(9):
        assert (
            affinity.rank_replicas(prefix_digests(chat(f"{messages} {LONG}", "and on")), loads)[0]
            == homes[messages]
        )


def test_a_replica_that_is_gone_is_forgotten() -> None:
    affinity, prefix = PrefixAffinity(), prefix_digests(chat(LONG))
    affinity.record_route(prefix, "a")
    affinity.retain_replicas(["b"])
    assert affinity.rank_replicas(prefix, {"b": 0, "a": 3})[0] == "b"
    assert affinity.rank_replicas(prefix, {}) == []


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200),
    st.integers(0, 5),
    st.integers(1, 5),
)
def test_imbalance_is_bounded(visits: list[tuple[int, bool]], slack: int, count: int) -> None:
    """However requests come and go, none is sent to a replica with more than slack answers beyond
    the least busy.
    """
    affinity, loads = PrefixAffinity(slack), {str(name): 0 for name in range(count)}
    routes: list[str] = []
    for messages, ends in visits:
        prefix = prefix_digests(chat(f"{messages} {LONG}"))
        order = affinity.rank_replicas(prefix, loads)
        assert sorted(order) == sorted(loads)
        assert loads[order[0]] <= min(loads.values()) + slack
        affinity.record_route(prefix, order[0])
        loads[order[0]] += 1
        routes.append(order[0])
        if ends:
            loads[routes.pop(0)] -= 1


def test_memory_of_beginnings_is_bounded() -> None:
    affinity = PrefixAffinity(max_prefixes=100)
    for messages in range(200):
        affinity.record_route(prefix_digests(chat(f"{messages} {LONG}")), "a")
    assert len(affinity._prefix_owner) == 100


def test_plans() -> None:
    orders = (
        OpenEngine("/m", {}, {}, later_weight_bytes=(7,)),
        OpenEngine("/n", {}, {}, num_loaded_before=1),
    )
    parts = [
        1 + order.num_loaded_before + len(order.later_weight_bytes)
        for order in ReplicaSpec(("m", "n"), orders, 8, 1024, "info")
        .with_memory_share(3)
        .open_messages
    ]
    assert parts == [6, 6], "three replicas of two engines"
    places = [
        (device, cluster_gpus) for device in ("auto", "cuda", "cpu") for cluster_gpus in (0, 8)
    ]
    assert [DeploymentSpec(2, 4, device).gpus_per_replica(there) for device, there in places] == [
        0,
        4,
        4,
        4,
        0,
        0,
    ]


# -- the front


class FakeReplicas:
    """Fake replicas with scripted answers: lists of parts; an Exception among them is raised."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        self.answers, self.calls, self.closed = list(answers), list[Any](), 0
        self.status = "ok"

    async def call_replica(
        self, head: dict[str, Any], body: bytes, prefix: Sequence[str], avoid: Sequence[str]
    ) -> AsyncGenerator[Any]:
        place = len(self.calls)
        self.calls.append((head, body, tuple(prefix), tuple(avoid)))
        try:
            yield f"r{place}"
            for part in self.answers[place]:
                if isinstance(part, Exception):
                    raise part
                if part == "wait":
                    await asyncio.Event().wait()
                yield part
        finally:
            self.closed += 1

    async def metrics_pages(self) -> list[tuple[str, bytes]]:
        return []

    def state(self) -> dict[str, Any]:
        return {"status": self.status, "replicas": {"running": 2, "target": 2}}


JSON = [(b"content-type", b"application/json"), (b"x-request-id", b"inner")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def ask(
    fake: FakeReplicas,
    limits: ServiceLimits | None = None,
    path: str = "/v1/completions",
    **options: Any,
) -> Response:
    service = Service({}, limits or ServiceLimits())
    client = Client(with_middleware(ReplicaProxy(fake, service), service))
    response = asyncio.run(client.post(path, {"prompt": LONG, "model": "m"}, **options))
    service.close()
    return response


def test_an_answer_goes_through() -> None:
    fake = FakeReplicas([(200, JSON), b"{}"])
    response = ask(fake, headers={"x-request-id": "mine", "authorization": "Bearer secret"})
    assert (response.status, response.body) == (200, b"{}")
    assert response.headers["x-request-id"] == "mine"
    ((head, body, prefix, avoid),) = fake.calls
    assert json.loads(body)["model"] == "m"
    assert (b"x-request-id", b"mine") in head["headers"]
    assert not [name for name, _ in head["headers"] if name in (b"authorization", b"host")]
    assert prefix == tuple(prefix_digests(body))
    assert avoid == ()
    assert fake.closed == 1


def test_a_replica_that_is_lost_before_it_answers_is_followed_by_another() -> None:
    fake = FakeReplicas([RuntimeError("actor died")], [(503, JSON), b"{}"], [(200, JSON), b"{}"])
    assert ask(fake).status == 200
    assert [avoid for *_, avoid in fake.calls] == [(), ("r0",), ("r0", "r1")]
    assert fake.closed == 3


def test_when_none_is_left_the_client_gets_an_error() -> None:
    lost = ask(FakeReplicas(*[[RuntimeError("actor died at 10.0.0.1")]] * 3))
    assert (lost.status, lost.json["error"]["code"]) == (503, "replica_lost")
    assert "10.0.0.1" not in lost.body.decode()
    assert "retry-after" in lost.headers
    # the last replica's own refusal is the answer
    refused = ask(FakeReplicas([ValueError()], [(503, JSON), b"1"], [(503, JSON), b'{"error": 1}']))
    assert (refused.status, refused.body) == (503, b'{"error": 1}')


def test_a_stream_that_breaks_ends_with_an_error_and_without_done() -> None:
    response = ask(FakeReplicas([(200, EVENTS), b"data: {}\n\n", RuntimeError("actor died")]))
    assert response.status == 200
    assert response.events[0] == {}
    assert response.events[-1]["error"]["code"] == "replica_lost"
    assert "[DONE]" not in response.events


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"overloaded'),
        ("/v1/responses", b'event: error\ndata: {"message":"the replica ended during'),
        ("/api/chat", b'{"error":"the replica ended during the response"}\n'),
    ],
)
def test_a_stream_that_breaks_ends_as_its_dialect_writes_errors(path: str, end: bytes) -> None:
    lines = [(b"content-type", b"application/x-ndjson; charset=utf-8")]
    headers, first = (lines, b"{}\n") if path == "/api/chat" else (EVENTS, b"data: {}\n\n")
    response = ask(FakeReplicas([(200, headers), first, RuntimeError("actor died")]), path=path)
    assert response.status == 200
    assert response.body.removeprefix(first).startswith(end)


def test_an_answer_that_breaks_is_asked_for_again() -> None:
    response = ask(
        FakeReplicas([(200, JSON), b'{"half', RuntimeError()], [(200, JSON), b'{"wh', b'ole": 1}'])
    )
    assert response.json == {"whole": 1}


def test_refusals_of_the_engine_are_not_tried_elsewhere() -> None:
    for status in (400, 404, 429):
        fake = FakeReplicas([(status, JSON), b"{}"])
        assert ask(fake).status == status
        assert len(fake.calls) == 1


def test_the_door_is_the_front_s() -> None:
    limits = ServiceLimits(api_keys=("secret",), max_body_bytes=2000)
    assert ask(FakeReplicas(), limits).status == 401
    assert (
        ask(FakeReplicas([(200, JSON)]), limits, headers={"authorization": "Bearer secret"}).status
        == 200
    )
    assert ask(FakeReplicas(), ServiceLimits(max_body_bytes=100)).status == 413
    assert ask(FakeReplicas(), headers={"host": "evil.example"}).status == 403


def test_while_none_is_ready() -> None:
    fake = FakeReplicas()
    fake.status = "loading"
    response = ask(fake)
    assert (response.status, response.json["error"]["code"]) == (503, "not_ready")
    service = Service({}, ServiceLimits())
    client = Client(with_middleware(ReplicaProxy(fake, service), service))
    assert asyncio.run(client.get("/health")).status == 503
    fake.status = "ok"
    assert asyncio.run(client.get("/health")).json == {
        "status": "ok",
        "replicas": {"running": 2, "target": 2},
    }
    service.start_draining()
    assert asyncio.run(client.get("/health")).json["status"] == "draining"


def test_who_leaves_takes_his_request_along() -> None:
    async def main() -> None:
        fake = FakeReplicas([(200, EVENTS), b"data: {}\n\n", "wait"])
        service = Service({}, ServiceLimits())
        client = Client(with_middleware(ReplicaProxy(fake, service), service))
        async with aclosing(client.parts("POST", "/v1/completions", {"prompt": "a"})) as parts:
            async for part_type, _ in parts:
                if part_type == "body":
                    break
        assert fake.closed == 1
        assert service.num_active == 0

    asyncio.run(main())


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
@pytest.mark.parametrize(
    "answer",
    [
        [(200, EVENTS), *[b"data: {}\n\n"] * 9, "wait"],
        [(200, EVENTS), b"data: {}\n\n", RuntimeError("actor died")],
        [(200, JSON), b"{}"],
    ],
    ids=("stream", "broken", "whole"),
)
def test_who_takes_nothing_is_dropped(
    monkeypatch: pytest.MonkeyPatch, answer: list[Any], num_chunks: int
) -> None:
    """However much he took before; and his request is given up."""
    monkeypatch.setattr(stream, "SEND_TIMEOUT", 0.05)
    fake = FakeReplicas(answer)
    service = Service({}, ServiceLimits())
    app = with_middleware(ReplicaProxy(fake, service), service)

    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        left = num_chunks

        async def full(message: Message) -> None:
            nonlocal left
            if not left:
                await asyncio.Event().wait()
            left -= 1
            await send(message)

        await app(scope, receive, full)

    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert len((await Client(stuck).post("/v1/completions", {"prompt": "a"})).body) <= 20
        assert fake.closed == 1
        assert service.num_active == 0

    asyncio.run(main())


def test_metrics_of_all_say_whose_they_are(running: ServiceThread) -> None:
    running.post("/v1/completions", {"model": "stories", "prompt": "a", "max_tokens": 2})
    page = running.get("/metrics").body
    both = merge_metrics([("r0", page), ("r1", page)]).decode()
    lines = [line for line in page.decode().splitlines() if line and not line.startswith("#")]
    metric_lines = [line for line in both.splitlines() if line and not line.startswith("#")]
    assert len(metric_lines) == 2 * len(lines)
    assert all('replica="r' in line for line in metric_lines)
    assert both.count("# TYPE modelmill:num_requests_running gauge") == 1
    assert 'modelmill:generation_tokens_total{model_name="stories",replica="r1"}' in both


# -- a replica's side


def test_a_client_that_leaves_while_the_queue_is_full_ends_the_application() -> None:
    head = {"method": "GET", "path": "/", "raw_path": b"/", "query": b"", "headers": []}
    ended = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(2 * MAX_QUEUED_CHUNKS):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            ended.append(scope["path"])

    async def leave() -> bool:
        response = call_asgi_app(app, head, b"")
        assert (await anext(response))[0] == 200
        await asyncio.sleep(0)  # the application's turn: it fills the place that is free
        closing = asyncio.ensure_future(response.aclose())
        done, _ = await asyncio.wait([closing], timeout=TIMEOUT_SECONDS)
        return closing in done

    assert asyncio.run(leave())
    assert ended == ["/"]


def test_the_application_called_without_a_socket(running: ServiceThread) -> None:
    head = {"method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
        "query": b"",
            "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    options = {"model": "stories", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}

    async def call_body(body: dict[str, Any], most: int | None = None) -> list[Any]:
        texts = []
        async with aclosing(
            call_asgi_app(running.client.app, head, json.dumps(body).encode())
        ) as pieces:
            async for piece in pieces:
                texts.append(piece)
                if len(texts) == most:
                    break
        return texts

    (status, _), reply = running.run(call_body(options))
    assert status == 200
    text = json.loads(reply)["choices"][0]["text"]
    start, *pieces = running.run(call_body({**options, "stream": True}))
    assert start[0] == 200
    events = [
        json.loads(line[6:])
        for line in b"".join(pieces).splitlines()
        if line.startswith(b"data: {")
    ]
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    # leaving ends the request in the engine
    long = {**options, "stream": True, "max_tokens": 450, "ignore_eos": True}
    running.run(call_body(long, most=2))

    async def idle() -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            stats = await running.engine.stats()
            if (
                stats is not None
                and stats.running == stats.waiting == 0
                and stats.free_pages == stats.pages
            ):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(stats)

    running.run(idle())


# -- the flags


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replicas", "2"), "--replicas needs --ray"),
        (("--ray-address", "auto"), "--ray-address needs --ray"),
        (("--ray", "--replicas", "0"), "--replicas must be between 1 and 1024"),
        (("--ray", "--device", "cuda:1"), "give --device cuda"),
    ],
)
def test_flags_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert run_command_line(["serve", "/nowhere/x.engine", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_ray(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelmill.cli.serve_ray.find_spec", lambda _: None)
    assert run_command_line(["serve", "/nowhere/x.engine", "--ray"]) == 1
    assert install_command("serve", "ray") in capsys.readouterr().err


def test_an_engine_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelmill.cli.serve_ray.find_spec", lambda _: object())
    assert run_command_line(["serve", "/nowhere/x.engine", "--ray"]) == 1
    assert "no such file or folder" in capsys.readouterr().err


def test_a_checkpoint_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[Any] = []

    def build(path: Path, config: Any, *_: Any) -> Path:
        built.append((path, config.quantization))
        return tmp_path / "cached.engine"

    monkeypatch.setattr("modelmill.llm.ensure_cached_engine", build)
    (tmp_path / "model.gguf").write_text("")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    order = _build_and_make_message_portable(
        OpenEngine("model.gguf", {"quantization": "int8"}, {"tp": 2}, chat_template="own.jinja")
    )
    assert built == [(Path("model.gguf"), "int8")]
    assert (order.model, order.build, order.run) == (str(tmp_path / "cached.engine"), {}, {"tp": 2})
    assert order.chat_template == str(tmp_path / "own.jinja")
