"""The page in two tabs at once: they show the same conversations and settings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.page_actions import expect, last_answer, send_message, wait_ready
from tests.browser.stubbed_answers import answer_with, event, finish, hold_answers, push

pytestmark = pytest.mark.browser


def two_tabs(opened: Any) -> tuple[Any, Any]:
    """Both show one conversation with a question and its answer."""
    first = opened()
    wait_ready(first)
    answer_with(first, "It turns.", "From the first tab.")
    send_message(first, "How does a mill work?")
    last_answer(first)
    second = first.context.new_page()
    second.goto(first.url)
    wait_ready(second)
    second.locator("#conversations .open").click()
    last_answer(second)
    answer_with(second, "From the second tab.")
    return first, second


def texts(page: Any) -> Any:
    return page.locator("article .said")


def test_a_conversation_goes_on_in_both(opened: Any) -> None:
    first, second = two_tabs(opened)
    send_message(second, "In the second")
    whole = ["How does a mill work?", "It turns.", "In the second", "From the second tab."]
    expect(texts(first)).to_have_text(whole)
    send_message(first, "In the first")
    whole += ["In the first", "From the first tab."]
    for page in (first, second):
        expect(texts(page)).to_have_text(whole)
    first.reload()
    expect(texts(first)).to_have_text(whole)


def test_an_edit_and_an_answer_are_not_disturbed(opened: Any) -> None:
    """What another tab writes is shown when they have ended."""
    first, second = two_tabs(opened)
    first.get_by_role("button", name="Edit this message").first.click()
    field = first.get_by_label("Edit the message")
    field.fill("Half an edit")
    send_message(second, "In the second")
    last_answer(second, 2)
    expect(field).to_have_value("Half an edit")
    hold_answers(first)
    expect(texts(first)).to_have_count(4)
    send_message(first, "In the first")
    push(first, event("Begun"))
    expect(texts(first).last).to_have_text("Begun")
    second.get_by_role("button", name="Regenerate this answer").first.click()
    expect(second.locator(".branches").first).to_have_text("2 / 2")
    push(first, event(" and ended"))
    expect(texts(first).last).to_have_text("Begun and ended")
    finish(first)
    expect(first.locator(".branches").first).to_be_visible()


@pytest.mark.parametrize("everything", [False, True])
def test_a_conversation_is_deleted_in_the_other(everything: bool, opened: Any) -> None:
    first, second = two_tabs(opened)
    first.get_by_label("Message", exact=True).fill("Half a message")
    if everything:
        second.get_by_role("button", name="Delete all").click()
        second.get_by_role("button", name="Delete all conversations").click()
    else:
        second.get_by_role("button", name="Options of How does a mill work?").click()
        second.get_by_role("button", name="Delete", exact=True).click()
        second.get_by_role("button", name="Delete for good").click()
    expect(first.locator("#trouble-text")).to_have_text(
        "This conversation was deleted in another tab."
    )
    expect(first.get_by_role("article")).to_have_count(0)
    expect(first.get_by_label("Message", exact=True)).to_have_value("Half a message")
    send_message(first, "Another one")
    last_answer(first)
    expect(first.locator("#conversations .title")).to_have_text(["Another one"])


def test_settings_of_one_tab_reach_the_other(opened: Any) -> None:
    """A tab that is opened before would write its old values over them."""
    first, second = two_tabs(opened)
    first.get_by_role("button", name="Settings", exact=True).click()
    first.get_by_label("Stop strings").fill("STOP")
    first.get_by_label("Top-k").fill("7")
    first.get_by_label("Appearance").select_option("dark")
    first.keyboard.press("Escape")
    second.get_by_role("button", name="Settings", exact=True).click()
    expect(second.get_by_label("Stop strings")).to_have_value("STOP")
    expect(second.get_by_label("Top-k")).to_have_value("7")
    expect(second.locator("html")).to_have_attribute("data-theme", "dark")
    second.keyboard.press("Escape")
    first.reload()
    wait_ready(first)
    first.get_by_role("button", name="Settings", exact=True).click()
    expect(first.get_by_label("Stop strings")).to_have_value("STOP")
