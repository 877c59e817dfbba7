"""Warm-up does its work and leaves no trace in logs and metrics."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from modelmill.serve import app, warmup
from modelmill.serve.app import REQUEST_MODELS, make_app
from modelmill.serve.routes import tokenize
from modelmill.serve.server import Server, ServerOptions
from modelmill.serve.service import Service, ServiceLimits
from tests.serve.asgi_client import Client
from tests.serve.service_thread import ServiceThread


def test_every_path_is_tried_and_nothing_is_logged(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    answer = app.error_response
    service = Service(
        running.service.engines, ServiceLimits(api_keys=("secret",)), running.service.metrics
    )
    service_app = make_app(service)
    monkeypatch.setattr(
        app,
        "error_response",
        lambda error, request: (tried.append(error.message), answer(error, request))[1],
    )
    monkeypatch.setattr("modelmill.serve.middleware._RequestContext", None)  # what writes the log
    running.run(warmup.warm_up_routes(service_app, tuple(REQUEST_MODELS)))
    assert len(tried) == 2 * len(REQUEST_MODELS)
    service.close()


def test_the_warm_up_does_what_a_first_request_would(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    ids = tokenize.encode_prompt
    monkeypatch.setattr(
        tokenize, "encode_prompt", lambda *args: (made.append(ids(*args)), made[-1])[1]
    )
    counted = running.run(running.engine.stats())
    running.run(warmup.warm_up_text_processing(running.client.app, "stories"))
    assert len(made) == 2
    assert all(made)
    assert running.run(running.engine.stats()) == counted


def test_the_openapi_document_is_made_on_a_thread(
    running: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    make = app.get_openapi

    def make_document(**options: Any) -> Any:
        threads.append(threading.get_ident())
        return make(**options)

    monkeypatch.setattr(app, "get_openapi", make_document)
    client = Client(make_app(running.service))

    async def request_counts() -> tuple[int, int]:
        return (await client.get("/openapi.json")).status, threading.get_ident()

    status, loop = running.run(request_counts())
    assert status == 200
    assert threads
    assert loop not in threads


def test_a_server_is_warm_before_its_port_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("warm_up_routes", "warm_up_openapi"):
        monkeypatch.setattr(warmup, name, _record_name(name, done, getattr(warmup, name)))
    monkeypatch.setattr(warmup, "freeze_gc", lambda: done.append("freeze_gc"))

    async def run() -> None:
        server = Server([], ServerOptions(port=0))
        await server.run(lambda _: (done.append("open"), server._stop_requested.set())[0])

    asyncio.run(run())
    assert done[:2] == ["warm_up_routes", "open"]
    assert set(done) <= {"warm_up_routes", "open", "warm_up_openapi", "freeze_gc"}


def _record_name(name: str, done: list[str], work: Any) -> Any:
    async def run(*args: Any) -> None:
        await work(*args)
        done.append(name)

    return run
