"""The catalogue over HTTP: state, loading and unloading, requests that wait, leave or fail."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from modelmill.serve.app import make_app
from modelmill.serve.engine_state import LoadProgress
from modelmill.serve.service import Service, ServiceLimits
from tests.serve.asgi_client import Client, Response
from tests.serve.catalogue.managed import Models, managed_models
from tests.serve.service_thread import ServiceThread

COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "stop_token_ids": []}


class CatalogueService:
    """A client of a service whose models are those of a manager."""

    def __init__(self, models: Models) -> None:
        self.models = models
        manager = models.manager
        self.service = Service(manager.engine_clients_by_name(), catalogue=manager)
        self.client = Client(make_app(self.service))

    def complete(self, name: str, **more: Any) -> asyncio.Task[Response]:
        """A completion, on its way when this returns."""
        body = {"model": name, **COMPLETION, **more}
        return asyncio.ensure_future(self.client.post("/v1/completions", body))

    async def card(self, name: str) -> dict[str, Any]:
        """What /v1/models says about a model."""
        cards = (await self.client.get("/v1/models")).json["data"]
        card: dict[str, Any] = next(each for each in cards if each["id"] == name)
        return card

    async def load_progress(self, name: str) -> float:
        """What /metrics says of the progress of loading a model."""
        page = (await self.client.get("/metrics")).body.decode()
        head = f'modelmill:model_load_progress{{model_name="{name}"}} '
        (line,) = (line for line in page.splitlines() if line.startswith(head))
        return float(line.removeprefix(head))


@contextlib.asynccontextmanager
async def catalogue_service(path: Path, **options: Any) -> AsyncIterator[CatalogueService]:
    async with managed_models(path, "a", "b", **options) as models:
        served = CatalogueService(models)
        try:
            yield served
        finally:
            served.service.close()


Check = Callable[[CatalogueService], Coroutine[Any, Any, None]]


def run(path: Path, check: Check, **options: Any) -> None:
    async def main() -> None:
        async with catalogue_service(path, **options) as served:
            await check(served)

    asyncio.run(main())


def test_a_request_loads_its_model_and_the_state_is_shown(stories: Path) -> None:
    async def check(served: CatalogueService) -> None:
        card = await served.card("a")
        assert (card["state"], card["progress"], card["pinned"]) == ("unloaded", 0.0, False)
        assert await served.load_progress("a") == 0
        assert card["engine_type"] == "language"
        assert card["max_model_len"] == 512
        health = await served.client.get("/health")
        assert (health.status, health.json["status"]) == (200, "ok")
        launcher = served.models.launchers["a"]
        launcher.gate.clear()
        request = served.complete("a")
        await served.models.until(lambda: launcher.launches)
        card = await served.card("a")
        assert card["state"] == "loading"
        assert 0 <= card["progress"] < 1
        served.models["a"].engine.progress = LoadProgress("loading", 3, 4)
        assert await served.load_progress("a") == (await served.card("a"))["progress"] > 0
        status = (await served.client.get("/health")).json["engines"][0]
        assert (status["state"], status["waiting"]) == ("loading", 1)
        assert {"stage", "done", "total", "fraction"} == set(status["progress"])
        launcher.gate.set()
        response = await request
        assert response.status == 200, response.body
        card = await served.card("a")
        assert (card["state"], card["progress"]) == ("loaded", 1.0)
        assert await served.load_progress("a") == 1
        assert card["expires_at"] > card["created"] + 200
        status = (await served.client.get("/health")).json["engines"][0]
        assert (status["state"], status["waiting"], status["pinned"]) == ("ready", 0, False)

    run(stories, check, keep_alive=300.0)


def test_load_and_unload(stories: Path) -> None:
    async def check(served: CatalogueService) -> None:
        post = served.client.post
        loaded = await post("/models/load", {"model": "a"})
        assert loaded.json == {"success": True, "model": "a", "state": "loaded"}
        assert (await post("/v1/models/load", {"model": "a"})).status == 200
        assert served.models.launchers["a"].launches == 1
        unloaded = await post("/models/unload", {"model": "a"})
        assert unloaded.json == {"success": True, "model": "a", "state": "unloaded"}
        served.models.launchers["b"].gate.clear()
        at_once = await post("/models/load", {"model": "b", "wait": False})
        assert at_once.json == {"success": True, "model": "b", "state": "loading"}
        await served.models.until(lambda: served.models["b"].state == "loading")
        served.models.launchers["b"].gate.set()
        await served.models.until(lambda: served.models["b"].state == "loaded")
        missing = await post("/models/load", {"model": "none"})
        assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
        served.models.manager.pin(served.models["b"], True)
        pinned = await post("/models/unload", {"model": "b"})
        assert (pinned.status, pinned.json["error"]["code"]) == (409, "pinned")

    run(stories, check)


def test_a_model_that_waits_for_its_turn_is_loading(stories: Path) -> None:
    async def check(served: CatalogueService) -> None:
        post, launcher = served.client.post, served.models.launchers["a"]
        launcher.gate.clear()
        for name in ("a", "b", "b"):
            queued = await post("/models/load", {"model": name, "wait": False})
            assert queued.json["state"] == "loading"
        await served.models.until(lambda: launcher.launches)
        card = await served.card("b")
        assert (card["state"], card["progress"]) == ("loading", 0.0)
        assert served.models["b"].state == "unloaded"
        metrics = (await served.client.get("/metrics")).body.decode()
        assert 'modelmill:model_state{model_name="b",state="loading"} 1.0' in metrics
        assert served.models.manager.num_waiting(served.models["b"]) == 1, "it is asked for once"
        launcher.gate.set()
        await served.models.until(lambda: served.models["b"].state == "loaded")
        assert (await served.card("b"))["state"] == "loaded"

    run(stories, check)


def test_pin_and_reload(stories: Path) -> None:
    async def check(served: CatalogueService) -> None:
        post = served.client.post
        assert (await post("/models/load", {"model": "a"})).status == 200
        assert (await post("/models/pin", {"model": "a"})).status == 200
        assert (await served.card("a"))["pinned"]
        first = served.models["a"].engine
        reloaded = await post("/models/reload", {"model": "a"})
        assert reloaded.json == {"success": True, "model": "a", "state": "loaded"}
        assert served.service.get_engine("a") is served.models["a"].engine is not first
        assert (await served.complete("a")).status == 200
        assert (await post("/models/pin", {"model": "a", "pinned": False})).status == 200
        assert not (await served.card("a"))["pinned"]
        unloaded = await post("/models/reload", {"model": "b"})
        assert unloaded.status == 400
        assert "is unloaded" in unloaded.json["error"]["message"]

    run(stories, check)


ADMIN_PATHS = ("/models/unload", "/models/pin", "/v1/models/reload", "/v1/models/%75nload")


@pytest.mark.parametrize(
    ("limits", "statuses"),
    [
        ({"api_keys": ("user",)}, {"user": 403, "wrong": 401}),
        ({"api_keys": ("user",), "admin_keys": ("admin",)}, {"user": 403, "wrong": 401}),
        ({"admin_keys": ("admin",)}, {"wrong": 403}),
    ],
)
def test_administration_needs_a_key_of_its_own(
    stories: Path, limits: dict[str, Any], statuses: dict[str, int]
) -> None:
    async def check(served: CatalogueService) -> None:
        engines, catalogue = served.service.engines, served.models.manager
        service = Service(engines, ServiceLimits(**limits), catalogue=catalogue)
        app = make_app(service)
        assert (await served.client.post("/models/load", {"model": "a"})).status == 200
        for path in ADMIN_PATHS:
            decoded = path.replace("%75", "u")
            for key, status in statuses.items():
                response = await Client(app, key).post(decoded, {"model": "a"}, raw=path)
                assert response.status == status, (path, key, response.body)
        assert served.models["a"].state == "loaded"
        if service.limits.admin_keys:
            assert (await Client(app, "admin").get("/v1/models")).status == 200
            unloaded = await Client(app, "admin").post("/models/unload", {"model": "a"})
            assert unloaded.json["state"] == "unloaded"
        service.close()

    run(stories, check)


def test_an_engine_that_is_always_loaded_is_not_administered(running: ServiceThread) -> None:
    for path in ("/models/unload", "/models/pin", "/models/reload"):
        response = running.post(path, {"model": "stories"})
        assert (response.status, response.json["error"]["code"]) == (409, "always_loaded")
    assert running.post("/models/load", {"model": "stories"}).json["state"] == "loaded"


def test_a_client_that_leaves_ends_its_wait(stories: Path) -> None:
    async def check(served: CatalogueService) -> None:
        launcher = served.models.launchers["a"]
        launcher.gate.clear()
        first = served.complete("a")
        await served.models.until(lambda: launcher.launches)
        parts = served.client.parts("POST", "/v1/completions", {"model": "b", **COMPLETION})
        reading = asyncio.ensure_future(anext(parts))
        manager = served.models.manager
        await served.models.until(lambda: manager.num_waiting(served.models["b"]))
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        await parts.aclose()
        assert manager.num_waiting(served.models["b"]) == 0
        launcher.gate.set()
        assert (await first).status == 200
        assert served.models.launchers["b"].launches == 0

    run(stories, check)


def test_a_stream_keeps_its_model_until_it_ends(stories: Path) -> None:
    async def check(served: CatalogueService) -> None:
        await served.models.limit_to_one()
        body = {"model": "a", **COMPLETION, "stream": True, "max_tokens": 40, "ignore_eos": True}
        parts = served.client.parts("POST", "/v1/completions", body)
        assert (await anext(parts))[1][0] == 200
        second = served.complete("b")
        await served.models.until(lambda: served.models["a"].state == "unloading")
        streamed = b"".join([data async for _, data in parts])
        assert streamed.endswith(b"data: [DONE]\n\n")
        assert (await second).status == 200
        assert served.models["a"].state == "unloaded"

    run(stories, check)


def test_a_model_that_cannot_be_loaded_is_an_error_of_one_line(stories: Path) -> None:
    async def check(served: CatalogueService) -> None:
        served.models.launchers["a"].error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        reason = "the worker of a failed: Cannot allocate memory"
        for path, body in (
            ("/v1/completions", {"model": "a", **COMPLETION}),
            ("/models/load", {"model": "a"}),
        ):
            response = await served.client.post(path, body)
            error = response.json["error"]
            assert (response.status, error["code"]) == (503, "model_load_failed")
            assert error["message"] == f"the model a cannot be loaded: {reason}"
            assert response.headers["retry-after"] == "5"
        status = (await served.client.get("/health")).json["engines"][0]
        assert (status["state"], status["error"]) == ("unloaded", reason)
        page = (await served.client.get("/metrics")).body.decode()
        assert 'modelmill:model_load_failures_total{model_name="a"} 2.0' in page

    run(stories, check)


def test_keep_alive_of_a_request(stories: Path) -> None:
    async def check(served: CatalogueService) -> None:
        assert (await served.complete("a", keep_alive="20s")).status == 200
        assert served.models.timers.seconds == [20.0]
        assert (await served.complete("a", keep_alive=0)).status == 200
        await served.models.until(lambda: served.models["a"].state == "unloaded")
        refused = await served.complete("a", keep_alive="soon")
        assert (refused.status, refused.json["error"]["param"]) == (400, "keep_alive")
        assert served.models.launchers["a"].launches == 1

    run(stories, check, keep_alive=300.0)


def test_metrics_say_what_is_loaded(stories: Path) -> None:
    async def check(served: CatalogueService) -> None:
        await served.models.limit_to_one()
        for name in ("a", "b"):
            assert (await served.complete(name)).status == 200
        page = (await served.client.get("/metrics")).body.decode()
        loader = served.models.manager.loader
        for line in (
            'modelmill:model_state{model_name="a",state="unloaded"} 1.0',
            'modelmill:model_state{model_name="b",state="loaded"} 1.0',
            'modelmill:model_load_seconds_count{model_name="b"} 1.0',
            'modelmill:model_unloads_total{model_name="a",reason="memory"} 1.0',
            'modelmill:num_requests_waiting_for_load{model_name="a"} 0.0',
        ):
            assert line in page, line
        for name, nbytes in (
            ("engine_memory", loader.used_bytes),
            ("memory_budget", loader.budget_bytes),
        ):
            value = re.search(rf"^modelmill:{name}_bytes (\S+)$", page, re.MULTILINE)
            assert value is not None
            assert float(value[1]) == nbytes

    run(stories, check)
