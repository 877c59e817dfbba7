"""What a person does on the page and waits for; without playwright its import skips the module that
asks for it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.conftest import SECONDS

expect = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright", exc_type=ImportError
).expect
WAIT = 1000 * SECONDS
STATS_PATTERN = re.compile(r"^([\d.]+ tokens/s · )?first token after [\d.]+ s · \d+ tokens?$")


def wait_ready(page: Any) -> None:
    expect(page.locator("#model option")).not_to_have_count(0, timeout=WAIT)
    expect(page.locator("#banner")).to_be_hidden(timeout=WAIT)
    expect(page.get_by_label("Message", exact=True)).to_be_editable()


def send_message(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    expect(page.locator("#send")).to_be_enabled(timeout=WAIT)  # the page knows its model
    page.keyboard.press("Enter")


def continue_answer(page: Any, note: str) -> Any:
    """Ask, and continue the answer, which shows the note and breaks off behind "The wheel "."""
    send_message(page, "What does it do?")
    answer = last_answer(page)
    expect(answer.locator(".note")).to_contain_text(note)
    answer.get_by_role("button", name="Continue this answer").click()
    expect(answer.locator(".answer")).to_have_text("The wheel turns.")
    return answer


def last_answer(page: Any, count: int = 1) -> Any:
    """The last of so many answers, once it is written."""
    answers = page.get_by_role("article", name="Answer")
    expect(answers).to_have_count(count, timeout=WAIT)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible(timeout=WAIT)
    return answers.nth(count - 1)
