"""Text files that go with a message."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.page_actions import expect, last_answer, send_message, wait_ready
from tests.browser.stubbed_answers import answer_with

pytestmark = pytest.mark.browser


def attach(page: Any, name: str, data: bytes, media_type: str = "text/plain") -> None:
    file = {"name": name, "mimeType": media_type, "buffer": data}
    page.locator("#attachment-file").set_input_files(file)


def test_text_files_go_with_the_message(opened: Any, shot: Any) -> None:
    page = opened()
    wait_ready(page)
    bodies = answer_with(page, "Seen.")
    attach(page, "notes.md", b"# Notes\n\n```\ncode\n```\n", "text/markdown")
    attach(page, "mill.py", "print('Mühle')".encode(), "text/x-python")
    expect(page.get_by_role("list", name="Files to send").locator("li")).to_have_count(2)
    shot(page, "files")
    page.get_by_role("button", name="Remove file mill.py").click()
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    attach(page, "mill.py", "print('Mühle')".encode(), "text/x-python")
    send_message(page, "What do they say?")
    last_answer(page)
    expect(page.get_by_role("list", name="Files to send")).to_be_hidden()
    assert bodies[0]["messages"] == [
        {
            "role": "user",
            "content": "notes.md\n````\n# Notes\n\n```\ncode\n```\n````\n\n"
            "mill.py\n```\nprint('Mühle')\n```\n\nWhat do they say?",
        }
    ]
    you = page.get_by_role("article", name="You")
    expect(you.locator(".said")).to_have_text("What do they say?")
    you.locator("summary", has_text="mill.py").click()
    expect(you.get_by_text("print('Mühle')")).to_be_visible()
    shot(page, "files-sent")
    page.reload()  # they are kept, and stay with an edited message
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_label("Edit the message").fill("And now?")
    page.keyboard.press("Enter")
    last_answer(page)
    assert bodies[1]["messages"][0]["content"].startswith("notes.md\n````\n# Notes")
    assert bodies[1]["messages"][0]["content"].endswith("\n\nAnd now?")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.bin", b"\x00\x01", "a.bin is not a text."),
        ("latin1.txt", "Mühle".encode("latin-1"), "latin1.txt is not a text."),
        ("large.txt", b"x" * ((1 << 20) + 1), "large.txt is larger than 1 MiB."),
    ],
)
def test_what_is_no_text_is_refused(opened: Any, name: str, data: bytes, message: str) -> None:
    page = opened()
    wait_ready(page)
    attach(page, name, data)
    expect(page.locator("#trouble-text")).to_have_text(message)
    expect(page.get_by_role("list", name="Files to send")).to_be_hidden()


def test_a_file_alone_is_a_message(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    bodies = answer_with(page, "Seen.")
    attach(page, "one.txt", b"one")
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
    page.get_by_role("button", name="Send", exact=True).click()
    last_answer(page)
    assert bodies[0]["messages"][0]["content"] == "one.txt\n```\none\n```"
    expect(page.locator("#conversations .title")).to_have_text("one.txt")
