"""Conversations are kept in the browser: found, renamed, exported, imported, deleted, branched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.page_actions import WAIT, expect, last_answer, send_message, wait_ready
from tests.browser.stubbed_answers import answer_with, event, hold_answers, push

pytestmark = pytest.mark.browser
# writes on until the text is in the database: the page keeps an answer every two seconds
UNTIL_KEPT = """async (text) => {
  const done = (request) => new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
  const database = await done(indexedDB.open("modelmill"));
  for (;;) {
    const all = await done(database.transaction("messages").objectStore("messages").getAll());
    if (all.some((message) => message.content.startsWith(text))) break;
    window.push({ choices: [{ index: 0, delta: { content: "." } }] });
    await new Promise(requestAnimationFrame);
  }
  database.close();
}"""  # noqa: E501


def listed(page: Any) -> Any:
    return page.locator("#conversations .title")


def new_conversation(page: Any) -> None:
    page.get_by_role("button", name="New conversation", exact=True).click()
    expect(page.get_by_role("article")).to_have_count(0)


def with_imported_file(opened: Any, text: str) -> Any:
    """A page that was given a file of conversations."""
    page = opened()
    wait_ready(page)
    file = {"name": "a.json", "mimeType": "application/json", "buffer": text.encode()}
    page.locator("#import-file").set_input_files(file)
    return page


def with_imported_conversation(opened: Any, conversation: Any, messages: list[Any]) -> Any:
    """A page that shows one conversation of a file."""
    whole = [{"conversation": conversation, "messages": messages}]
    text = {"format": "modelmill-conversations", "version": 1, "conversations": whole}
    page = with_imported_file(opened, json.dumps(text))
    expect(listed(page)).to_have_text([conversation["title"]])
    page.locator("#conversations .open").click()
    return page


def options(page: Any, title: str) -> None:
    page.get_by_role("button", name=f"Options of {title}").click()
    expect(page.get_by_role("dialog", name="Conversation")).to_be_visible()


def two_conversations(opened: Any) -> Any:
    page = opened()
    wait_ready(page)
    answer_with(page, "It turns a **wheel**.", "Rain falls on the roof.")
    send_message(page, "How does a mill work?")
    last_answer(page)
    new_conversation(page)
    send_message(page, "Write about weather")
    last_answer(page)
    expect(listed(page)).to_have_text(["Write about weather", "How does a mill work?"])
    return page


def with_half_an_answer(opened: Any) -> Any:
    """A page whose answer has begun and goes on."""
    page = opened()
    hold_answers(page)
    send_message(page, "Tell me more")
    push(page, event("The first half"))
    expect(page.get_by_role("article", name="Answer")).to_contain_text("The first half")
    return page


def test_conversations_outlive_the_tab(opened: Any, shot: Any) -> None:
    page = two_conversations(opened)
    shot(page, "conversations")
    page.close()
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.get_by_role("article")).to_have_count(0)
    expect(listed(other)).to_have_count(2)
    other.get_by_role("button", name=re.compile("^How does a mill work")).click()
    expect(other.get_by_role("article", name="Answer")).to_contain_text("It turns a wheel.")
    expect(other.locator("#conversations [aria-current=true]")).to_contain_text("mill")


@pytest.mark.parametrize("broken", ["throws", "never answers"])
def test_a_browser_that_keeps_nothing_says_so(opened: Any, broken: str) -> None:
    page = opened()
    request = "throw new Error('no')" if broken == "throws" else "return {}"
    page.context.add_init_script(f"IDBFactory.prototype.open = () => {{ {request} }}")
    page.reload()
    notice = page.get_by_text("This browser keeps nothing for this page")
    expect(notice).to_be_visible(timeout=WAIT)
    answer_with(page, "It turns.")
    send_message(page, "How does a mill work?")
    expect(last_answer(page)).to_contain_text("It turns.")
    expect(listed(page)).to_have_text(["How does a mill work?"])
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    assert "It turns." in Path(download.value.path()).read_text()


def test_a_conversation_in_another_tab_appears(opened: Any) -> None:
    page = two_conversations(opened)
    other = page.context.new_page()
    other.goto(page.url)
    expect(listed(other)).to_have_count(2)
    new_conversation(page)
    send_message(page, "A third one")
    expect(listed(other)).to_have_count(3)


def test_an_unfinished_answer_is_kept_when_the_tab_closes(opened: Any) -> None:
    page = with_half_an_answer(opened)
    page.evaluate(UNTIL_KEPT, "The first half")
    page.reload()
    answer = page.get_by_role("article", name="Answer")
    expect(answer).to_contain_text("The first half")
    expect(answer.locator(".note")).to_have_text("This answer has not been finished.")
    expect(answer.get_by_role("button", name="Continue this answer")).to_be_enabled()


def test_search_in_titles_and_texts(opened: Any, shot: Any) -> None:
    page = two_conversations(opened)
    search = page.get_by_label("Search conversations")
    search.fill("WHEEL")
    expect(listed(page)).to_have_text(["How does a mill work?"])
    expect(page.locator("#conversations mark")).to_have_text("wheel")
    expect(page.locator("#voice")).to_have_text("1 conversation found")
    shot(page, "search")
    search.fill("weather")
    expect(listed(page)).to_have_text(["Write about weather"])
    search.fill("roof  write")  # in any order, in title and text
    expect(listed(page)).to_have_text(["Write about weather"])
    expect(page.locator("#conversations mark")).to_have_text(["Write", "roof"])
    search.fill("wheel roof")
    expect(listed(page)).to_have_count(0)
    search.fill("nowhere")
    expect(page.get_by_text("No conversation has these words.")).to_be_visible()
    search.press("Escape")
    expect(search).to_have_value("")
    expect(listed(page)).to_have_count(2)


def test_a_conversation_is_renamed(opened: Any) -> None:
    page = two_conversations(opened)
    options(page, "Write about weather")
    page.get_by_label("Title", exact=True).fill("Given up")
    page.keyboard.press("Escape")
    options(page, "Write about weather")
    page.get_by_label("Title", exact=True).fill("Rain")
    page.keyboard.press("Enter")
    expect(listed(page)).to_have_text(["Rain", "How does a mill work?"])
    page.reload()
    expect(listed(page)).to_have_text(["Rain", "How does a mill work?"])
    send_message(page, "More")  # a later message does not bring the old title back
    last_answer(page, 2)
    expect(listed(page)).to_have_text(["Rain", "How does a mill work?"])


def test_export_and_import(opened: Any, tmp_path: Path) -> None:
    page = two_conversations(opened)
    options(page, "How does a mill work?")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as Markdown").click()
    assert download.value.suggested_filename == "How does a mill work.md"
    assert Path(download.value.path()).read_text() == (
        "# How does a mill work?\n\n## You\n\nHow does a mill work?\n\n"
        "## writer\n\nIt turns a **wheel**.\n"
    )
    with page.expect_download() as download:
        page.get_by_role("button", name="Export as JSON").click()
    one = json.loads(Path(download.value.path()).read_text())
    assert [each["role"] for each in one["conversations"][0]["messages"]] == ["user", "assistant"]
    page.keyboard.press("Escape")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    exported = Path(download.value.path())
    assert len(json.loads(exported.read_text())["conversations"]) == 2
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("button", name="Delete all conversations").click()
    expect(listed(page)).to_have_count(0)
    expect(page.get_by_role("article")).to_have_count(0)
    page.locator("#import-file").set_input_files(exported)
    expect(listed(page)).to_have_text(["Write about weather", "How does a mill work?"])
    page.locator("#import-file").set_input_files(exported)  # nothing is overwritten
    expect(listed(page)).to_have_count(4)
    page.get_by_role("button", name=re.compile("^How does a mill work")).first.click()
    expect(page.get_by_role("article", name="Answer")).to_contain_text("It turns a wheel.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "This file is not JSON. Choose a file that this page has exported."),
        ('{"format": "other"}', "This file has no conversations of this page."),
        (
            '{"format": "modelmill-conversations", "version": 9, "conversations": []}',
            "This file has version 9; this page reads version 1.",
        ),
        *(
            (
                f'{{"format": "modelmill-conversations", "version": 1, "conversations": [{each}]}}',
                "A conversation of this file is not complete.",
            )
            for each in (
                "{}",
                "null",
                '{"conversation": {"title": "Empty"}, "messages": []}',
                '{"conversation": {"title": "No id"}, "messages": [{"role": "user"}]}',
            )
        ),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(opened: Any, text: str, message: str) -> None:
    page = with_imported_file(opened, text)
    expect(page.locator("#trouble-text")).to_have_text(message)
    expect(listed(page)).to_have_count(0)


def test_an_imported_file_runs_nothing(opened: Any) -> None:
    """Pictures that are no data: URLs are left out, texts stay texts."""
    message = {
        "id": "1", "parent": None, "role": "user", "content": "<img src=x onerror=alert(1)>",
        "created": 1, "pictures": ["https://evil.example/pixel.png"],
    }  # fmt: skip
    conversation = {"id": "c", "title": "<b>T</b>", "leaf": "1"}
    page = with_imported_conversation(opened, conversation, [message])
    expect(page.get_by_role("article", name="You")).to_contain_text("<img src=x onerror=alert(1)>")
    expect(page.locator("article img")).to_have_count(0)


ODD = {"pictures": {}, "files": "x", "calls": [None], "created": 1e300, "reasoning": {}}


@pytest.mark.parametrize(
    ("parents", "shown"),
    [((None, "a", "b"), 3), (("a", "a", "b"), 3), (("c", "a", "b"), 3), (("b", "a", "gone"), 1)],
)
def test_odd_values_of_a_file_do_no_harm(
    parents: tuple[str | None, ...], shown: int, opened: Any
) -> None:
    """Messages whose parents lead round in a circle once stopped the tab, and values of other
    types were reported in words of JavaScript.
    """
    messages = [
        {**ODD, "id": own, "parent": parent, "role": role, "content": f"Text {own}"}
        for own, parent, role in zip("abc", parents, ("user", "assistant", "user"), strict=True)
    ]
    conversation = {"title": "Odd", "leaf": "c", "created": "x", "updated": 1e300}
    page = with_imported_conversation(opened, conversation, messages)
    expect(page.get_by_role("article")).to_have_count(shown)
    expect(page.locator("article .said").last).to_have_text("Text c")


def test_an_unsent_message_outlives_a_reload(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    page.get_by_label("Message", exact=True).fill("Half a\nmessage")
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Half a\nmessage")
    expect(page.locator("#send")).to_be_enabled()
    answer_with(page, "Yes.")
    page.locator("#send").click()
    last_answer(page)
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("")


def test_the_tab_is_named_after_its_conversation(opened: Any) -> None:
    page = two_conversations(opened)
    expect(page).to_have_title("Write about weather · modelmill")
    new_conversation(page)
    expect(page).to_have_title("modelmill")


def test_a_conversation_is_deleted_after_a_question(opened: Any) -> None:
    page = two_conversations(opened)
    options(page, "Write about weather")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_text("It cannot be brought back.")).to_be_visible()
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Enter")
    expect(listed(page)).to_have_count(2)
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete for good").click()
    expect(listed(page)).to_have_text(["How does a mill work?"])
    expect(page.get_by_role("article")).to_have_count(0)  # it was the one that was shown
    page.reload()
    expect(listed(page)).to_have_text(["How does a mill work?"])


def test_an_answer_does_not_bring_a_deleted_conversation_back(opened: Any) -> None:
    page = with_half_an_answer(opened)
    options(page, "Tell me more")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete for good").click()
    expect(page.get_by_role("article")).to_have_count(0)
    expect(page.locator("#send")).to_be_visible()  # the request has ended
    send_message(page, "Another one")
    expect(listed(page)).to_have_text(["Another one"])
    page.reload()
    expect(listed(page)).to_have_text(["Another one"])


def test_the_list_keeps_the_focus_when_it_changes(opened: Any) -> None:
    page = two_conversations(opened)
    row = page.get_by_role("button", name="Options of How does a mill work?")
    row.focus()
    other = page.context.new_page()
    other.goto(page.url)
    wait_ready(other)
    answer_with(other, "Yes.")
    send_message(other, "A third one")
    expect(listed(page)).to_have_count(3)
    expect(row).to_be_focused()


def test_edits_and_regenerations_make_branches(opened: Any, shot: Any) -> None:
    page = opened()
    wait_ready(page)
    bodies = answer_with(page, "First.", "Second.", "Third.", "Fourth.")
    send_message(page, "One")
    answer = last_answer(page)
    answer.get_by_role("button", name="Regenerate this answer").click()
    expect(answer).to_contain_text("Second.")
    expect(answer.locator(".branches")).to_have_text("2 / 2")
    answer.get_by_role("button", name="Previous version").click()
    expect(answer).to_contain_text("First.")
    expect(answer.get_by_role("button", name="Previous version")).to_be_disabled()
    expect(answer.get_by_role("button", name="Next version")).to_be_focused()
    expect(page.locator("#voice")).to_have_text("Version 1 of 2")
    send_message(page, "Two")  # goes on from the version that is shown
    last_answer(page, 2)
    assert [each["content"] for each in bodies[-1]["messages"]] == ["One", "First.", "Two"]
    page.get_by_role("button", name="Edit this message").first.click()
    page.get_by_label("Edit the message").fill("Uno")
    page.keyboard.press("Enter")
    expect(last_answer(page)).to_contain_text("Fourth.")
    you = page.get_by_role("article", name="You").first
    expect(you.locator(".branches")).to_have_text("2 / 2")
    shot(page, "branches")
    assert [each["content"] for each in bodies[-1]["messages"]] == ["Uno"]
    you.get_by_role("button", name="Previous version").click()
    expect(page.get_by_role("article", name="Answer")).to_have_count(2)
    expect(page.get_by_role("article", name="Answer").nth(1)).to_contain_text("Third.")
    page.reload()  # the branch that was shown is shown again
    expect(page.get_by_role("article", name="Answer").nth(1)).to_contain_text("Third.")


def test_system_prompts_are_presets(opened: Any, shot: Any) -> None:
    page = opened()
    wait_ready(page)
    bodies = answer_with(page, "Arr.")
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("System prompt").fill("You are a pirate.")
    page.get_by_label("Save it as a preset").fill("Pirate")
    page.get_by_role("button", name="Save the preset").click()
    expect(page.get_by_label("Preset", exact=True)).to_have_value("Pirate")
    page.get_by_label("System prompt").fill("You are a poet.")
    expect(page.get_by_label("Preset", exact=True)).to_have_value("")
    page.get_by_label("Save it as a preset").fill("Poet")
    page.keyboard.press("Enter")
    page.get_by_label("Preset", exact=True).select_option("Pirate")
    expect(page.get_by_label("System prompt")).to_have_value("You are a pirate.")
    shot(page, "presets")
    page.get_by_role("button", name="Done").click()
    send_message(page, "Hello")
    last_answer(page)
    assert bodies[0]["messages"][0] == {"role": "system", "content": "You are a pirate."}
    # a conversation has its own system prompt
    new_conversation(page)
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Preset", exact=True).select_option("Poet")
    page.get_by_role("button", name="Done").click()
    send_message(page, "Another hello")
    last_answer(page)
    assert bodies[1]["messages"][0]["content"] == "You are a poet."
    page.get_by_role("button", name=re.compile("^Hello")).click()
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(page.get_by_label("System prompt")).to_have_value("You are a pirate.")
    page.get_by_role("button", name="Delete the preset").click()
    options_text = page.locator("#preset option").all_inner_texts()
    assert options_text == ["No preset", "Poet"]
