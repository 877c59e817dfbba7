"""The page over plain http from another machine, as a phone reads it: browsers offer less there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.page_actions import expect, last_answer, send_message, wait_ready
from tests.browser.stubbed_answers import answer_with
from tests.serve.server_process import ServerProcess

pytestmark = pytest.mark.browser
OTHER_MACHINE = "http://mill.test"


@pytest.fixture
def page(chromium: Any, server: ServerProcess) -> Iterator[Any]:
    """The page under another machine's name, which no name server knows."""
    context = chromium.new_context()
    context.route(
        f"{OTHER_MACHINE}/**",
        lambda route: route.fulfill(
            response=route.fetch(url=route.request.url.replace(OTHER_MACHINE, server.url))
        ),
    )
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(OTHER_MACHINE)
    yield page
    context.close()
    assert errors == []


def test_conversations_and_copies_work(page: Any) -> None:
    """``crypto.randomUUID`` and ``navigator.clipboard`` are missing there."""
    assert page.evaluate("[isSecureContext, crypto.randomUUID, navigator.clipboard]") == [
        False, None, None,
    ]  # fmt: skip
    wait_ready(page)
    answer_with(page, "It turns a wheel.\n\n```\nx = 1\n```")
    send_message(page, "How does a mill work?")
    answer = last_answer(page)
    expect(answer).to_contain_text("It turns a wheel.")
    expect(page.locator("#conversations .title")).to_have_text("How does a mill work?")
    field = page.get_by_label("Message", exact=True)
    for place, text in ((".code-head", "x = 1"), (".foot", "It turns a wheel.")):
        copy = answer.locator(place).get_by_role("button").first
        copy.click()
        expect(copy).to_have_text("Copied")
        field.fill("")
        field.press("Control+V")
        assert field.input_value().startswith(text)


def test_a_copy_that_fails_says_so(page: Any) -> None:
    wait_ready(page)
    answer_with(page, "It turns a wheel.")
    send_message(page, "How does a mill work?")
    answer = last_answer(page)
    page.evaluate("document.execCommand = () => false")
    answer.get_by_role("button", name="Copy this answer").click()
    expect(answer.get_by_role("button", name="Not copied")).to_be_visible()
