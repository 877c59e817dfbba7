"""The model picker: states of models that a server loads on demand, as /v1/models tells them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.browser.page_actions import expect, last_answer, send_message, wait_ready
from tests.browser.stubbed_answers import answer_with

pytestmark = pytest.mark.browser


class Served:
    """Two models of a server that loads on demand; a test changes their state."""

    def __init__(self, page: Any) -> None:
        self.states: dict[str, dict[str, Any]] = {
            "small": {"state": "loaded"},
            "large": {"state": "unloaded"},
        }
        self.loads: list[Any] = []
        self.refusal: str | None = None
        page.route("**/v1/models", self._list)
        page.route("**/models/load", self._load)

    def _list(self, route: Any) -> None:
        card = {"object": "model", "created": 1, "owned_by": "modelmill", "engine_type": "language"}
        sizes = {"max_model_len": 512, "input_modalities": ["text"], "chat": True}
        data = [
            {"id": name, "root": name, **card, **sizes, **state}
            for name, state in self.states.items()
        ]
        route.fulfill(json={"object": "list", "data": data})

    def _load(self, route: Any) -> None:
        self.loads.append(route.request.post_data_json)
        if self.refusal is not None:
            error = {"message": self.refusal, "type": "t", "param": None, "code": None}
            route.fulfill(status=400, body=json.dumps({"error": error}))
            return
        self.states["large"] = {"state": "loading", "progress": 0.25}
        route.fulfill(json={"id": "large", "state": "loading"})


def test_a_model_is_picked_loaded_and_asked(opened: Any, shot: Any) -> None:
    page = opened()
    wait_ready(page)
    served = Served(page)
    page.reload()
    picker = page.get_by_label("Model", exact=True)
    expect(picker.locator("option")).to_have_text(["small", "large (not loaded)"])
    expect(page.locator("#banner")).to_be_hidden()
    picker.select_option("large")
    banner = page.locator("#banner")
    expect(banner).to_contain_text("large is not loaded.")
    expect(page.get_by_label("Message", exact=True)).to_have_attribute(
        "placeholder", "The model is not ready"
    )
    page.get_by_label("Message", exact=True).fill("Hello")
    expect(page.locator("#send")).to_be_disabled()
    shot(page, "model-not-loaded")
    page.get_by_role("button", name="Load large").click()
    expect(banner).to_contain_text("large is loading 25 %")
    expect(page.get_by_role("progressbar")).to_have_attribute("value", "0.25")
    expect(page.get_by_role("button", name="Load large")).to_be_hidden()
    shot(page, "model-loading")
    assert served.loads == [{"model": "large"}]
    served.states["large"] = {"state": "loading", "progress": 0.8}
    expect(banner).to_contain_text("large is loading 80 %")
    expect(picker.locator("option")).to_have_text(["small", "large (loading)"])
    served.states["large"] = {"state": "loaded", "progress": 1.0}
    expect(banner).to_be_hidden()
    expect(picker.locator("option")).to_have_text(["small", "large"])
    bodies = answer_with(page, "Hello.")
    send_message(page, "Hello")
    last_answer(page)
    assert bodies[0]["model"] == "large"


def test_a_load_that_is_refused_says_why(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    served = Served(page)
    served.refusal = "large needs 40 GB, 12 GB are free: unload small first"
    page.reload()
    page.get_by_label("Model", exact=True).select_option("large")
    page.get_by_role("button", name="Load large").click()
    expect(page.get_by_role("alert")).to_contain_text(served.refusal)
    expect(page.get_by_role("button", name="Load large")).to_be_visible()


def test_a_model_that_is_being_unloaded(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    served = Served(page)
    served.states["small"] = {"state": "unloading"}
    page.reload()
    expect(page.locator("#banner")).to_contain_text("small is being unloaded …")
    served.states["small"] = {"state": "unloaded"}
    expect(page.get_by_role("button", name="Load small")).to_be_visible()


def test_a_sleeping_model_is_woken_up(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    served = Served(page)
    served.states["large"] = {"state": "sleeping", "progress": 1.0}
    page.reload()
    picker = page.get_by_label("Model", exact=True)
    expect(picker.locator("option")).to_have_text(["small", "large (sleeping)"])
    picker.select_option("large")
    expect(page.locator("#banner")).to_contain_text("large is sleeping.")
    page.get_by_role("button", name="Wake up large").click()
    expect(page.locator("#banner")).to_contain_text("large is loading 25 %")
    assert served.loads == [{"model": "large"}]
