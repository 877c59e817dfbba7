"""A browser whose storage is full: nothing is lost without a word, and all can be exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.page_actions import expect, last_answer, send_message, wait_ready
from tests.browser.stubbed_answers import answer_with

pytestmark = pytest.mark.browser
FULL = "The browser's storage is full"
QUOTA_BYTES = 3000


def set_quota(page: Any, size: int | None) -> None:
    """Give the page's origin this many bytes of storage; None: as many as before."""
    session = page.context.new_cdp_session(page)
    origin = page.evaluate("location.origin")
    quota = {} if size is None else {"quotaSize": size}
    session.send("Storage.overrideQuotaForOrigin", {"origin": origin, **quota})


def with_full_storage(opened: Any) -> Any:
    page = opened()
    wait_ready(page)
    set_quota(page, QUOTA_BYTES)
    answer_with(page, "It turns. " * 2000)
    send_message(page, "How does a mill work?")
    last_answer(page)
    expect(page.locator("#trouble-text")).to_contain_text(f"{FULL}: this conversation is lost")
    return page


def test_a_conversation_that_is_not_stored_is_listed_and_exported(opened: Any) -> None:
    page = with_full_storage(opened)
    rows = page.locator("#conversations li")
    expect(rows).to_have_count(1)
    expect(rows.locator(".lost")).to_have_text("Not kept: export it")
    page.get_by_role("button", name="New conversation", exact=True).click()
    expect(page.get_by_role("article")).to_have_count(0)
    rows.locator(".open").click()
    expect(page.get_by_role("article", name="Answer")).to_contain_text("It turns.")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    assert "It turns." in Path(download.value.path()).read_text()
    # leaving asks before it is lost
    dialog_types: list[str] = []

    def accept(dialog: Any) -> None:
        dialog_types.append(dialog.type)
        dialog.accept()

    page.on("dialog", accept)
    page.reload()
    assert dialog_types == ["beforeunload"]
    expect(rows).to_have_count(0)


def test_it_is_stored_whole_when_there_is_room_again(opened: Any) -> None:
    page = with_full_storage(opened)
    set_quota(page, None)
    answer_with(page, "A second answer.")
    send_message(page, "And then?")
    expect(last_answer(page, 2)).to_contain_text("A second answer.")
    expect(page.locator("#conversations .lost")).to_have_count(0)
    page.reload()
    expect(page.locator("article .said")).to_have_count(4)
    expect(page.get_by_role("article", name="Answer").first).to_contain_text("It turns.")


def test_a_file_that_does_not_fit_says_so(opened: Any) -> None:
    page = with_full_storage(opened)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    page.get_by_role("button", name="Close").click()
    page.locator("#import-file").set_input_files(download.value.path())
    expect(page.locator("#trouble-text")).to_contain_text(f"{FULL}: not all of the file is kept")
