"""The page with the keyboard, for screen readers, in light and dark, and on a phone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.page_actions import expect, last_answer, send_message, wait_ready
from tests.browser.stubbed_answers import answer_with
from tests.browser.test_markdown import CODE, MATH, NOTES, TABLE, TASKS

pytestmark = pytest.mark.browser
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}

# ratio of WCAG between the text of each element and the first ground behind it that is not clear
CONTRASTS = """(selector) => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const pixel = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = pixel(colour).slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (pixel(colour)[3] === 255) return light(colour);
    }
    return 1;
  };
  return [...document.querySelectorAll(selector)]
    .filter((each) => each.checkVisibility() && each.textContent.trim() && !each.disabled)
    .map((each) => {
      const [a, b] = [light(getComputedStyle(each).color), ground(each)].sort((x, y) => y - x);
      return [each.className || each.tagName, each.textContent.slice(0, 20), (a + 0.05) / (b + 0.05)];
    });
}"""  # noqa: E501


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(opened: Any, shot: Any, scheme: str) -> None:
    """WCAG AA: 4.5 for every text of the list, the answers, highlighted code and the dialogs."""
    page = opened(color_scheme=scheme)
    wait_ready(page)
    code = CODE.replace("return 3", "return 3 + len('a')") + "\n\n```html\n<p class=x>t</p>\n```"
    answer_with(page, "\n\n".join(("## Mills", TABLE, TASKS, NOTES, MATH, code)))
    send_message(page, "Show me everything")
    answer = last_answer(page)
    expect(answer.locator(".hl-keyword").first).to_be_visible()
    expect(answer.locator(".katex").first).to_be_visible()
    shot(page, f"everything-{scheme}")
    texts = page.evaluate(CONTRASTS, "button, a, p, li, span, td, th, h2, code")
    assert len(texts) > 60
    low = [each for each in texts if each[2] < 4.5]
    assert low == []
    page.get_by_role("button", name="Settings", exact=True).click()
    texts = page.evaluate(CONTRASTS, "#settings :is(label, p, h2, h3, button)")
    assert len(texts) > 15
    assert [each for each in texts if each[2] < 4.5] == []


PLACEHOLDERS = """() => [...document.querySelectorAll("input, textarea")]
  .filter((each) => each.placeholder && each.checkVisibility()).map((each) => {
    const twin = document.createElement("p");
    twin.textContent = each.placeholder;
    twin.className = "twin";
    twin.style.color = getComputedStyle(each, "::placeholder").color;
    twin.style.background = getComputedStyle(each).backgroundColor;
    each.after(twin);
  }).length"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_placeholders_and_found_words_stand_out(opened: Any, scheme: str) -> None:
    page = opened(color_scheme=scheme)
    wait_ready(page)
    answer_with(page, "It turns a wheel.")
    send_message(page, "How does a mill work?")
    last_answer(page)
    assert page.evaluate(PLACEHOLDERS) == 2
    page.get_by_label("Search conversations").fill("wheel")
    expect(page.locator("mark")).to_be_visible()
    page.get_by_role("button", name="Settings", exact=True).click()
    assert page.evaluate(PLACEHOLDERS) > 8
    texts = page.evaluate(CONTRASTS, ".twin, mark")
    assert len(texts) > 10
    assert [each for each in texts if each[2] < 4.5] == []


def test_shortcuts_are_listed_and_work(opened: Any, shot: Any) -> None:
    page = opened()
    wait_ready(page)
    answer_with(page, "One.", "Two.")
    page.keyboard.press("Alt+/")
    dialog = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(dialog).to_be_visible()
    expect(dialog.locator("dt")).to_have_count(11)
    shot(page, "help")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.keyboard.press("Alt+m")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    send_message(page, "Hello")
    last_answer(page)
    page.keyboard.press("Alt+r")
    expect(page.locator(".branches")).to_have_text("2 / 2")
    page.keyboard.press("Alt+k")
    expect(page.get_by_label("Search conversations")).to_be_focused()
    page.keyboard.press("Alt+b")
    expect(page.get_by_role("navigation")).to_be_hidden()
    toggle = page.get_by_role("button", name="Conversations", exact=True)
    expect(toggle).to_have_attribute("aria-expanded", "false")
    page.reload()  # it stays hidden
    expect(page.get_by_role("article", name="Answer")).to_have_count(1)
    expect(page.get_by_role("navigation")).to_be_hidden()
    page.keyboard.press("Alt+b")
    expect(page.get_by_role("navigation")).to_be_visible()
    page.keyboard.press("Alt+n")
    expect(page.get_by_role("article")).to_have_count(0)
    page.keyboard.press("Alt+,")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()


def test_the_order_of_the_focus(opened: Any) -> None:
    """From the top of the page to the message field, as it is read; every stop can be seen."""
    page = opened()
    wait_ready(page)
    answer_with(page, "One.")
    send_message(page, "Hello")
    last_answer(page)
    page.reload()
    expect(page.get_by_role("button", name="Regenerate this answer")).to_be_enabled()
    names = []
    for _ in range(30):
        page.keyboard.press("Tab")
        names.append(
            page.evaluate(
                "document.activeElement.getAttribute('aria-label') || document.activeElement.id"
                " || document.activeElement.textContent.trim()"
            )
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        inside = page.evaluate("document.activeElement.id === 'message'")
        assert outline != "none" or inside, names[-1]
        if inside:
            break
    order = [
        "To the message field", "Conversations", "tab-chat", "New conversation",
        "Keyboard shortcuts", "Settings", "New conversation in the list", "search",
        "Options of Hello", "import", "export-all", "delete-all",
        "Conversation", "Edit this message", "Copy this answer", "Regenerate this answer",
        "Add files", "message",
    ]  # fmt: skip
    assert [name for name in names if not name.startswith("Hello")] == order


def test_ids_are_unique_and_labels_lead_somewhere(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    references = page.evaluate(
        "[...document.querySelectorAll('[for], [aria-labelledby], [aria-describedby], "
        "[aria-controls]')].flatMap((each) => ['for', 'aria-labelledby', 'aria-describedby', "
        "'aria-controls'].flatMap((name) => (each.getAttribute(name) ?? '').split(' ')))"
    )
    assert {name for name in references if name} <= set(ids)


def test_the_list_on_a_phone(opened: Any, shot: Any) -> None:
    """It covers the conversation, keeps the focus inside, and closes by Esc, a tap or a choice."""
    page = opened(**PHONE)
    wait_ready(page)
    answer_with(page, "One.")
    send_message(page, "Hello")
    last_answer(page)
    navigation = page.get_by_role("navigation")
    expect(navigation).to_be_hidden()
    toggle = page.get_by_role("button", name="Conversations", exact=True)
    toggle.tap()
    expect(navigation).to_be_visible()
    expect(page.get_by_label("Search conversations")).to_be_focused()
    assert page.evaluate("document.querySelector('main').inert")
    shot(page, "phone-list")
    page.keyboard.press("Escape")
    expect(navigation).to_be_hidden()
    expect(toggle).to_be_focused()
    toggle.tap()
    page.touchscreen.tap(350, 400)
    expect(navigation).to_be_hidden()
    toggle.tap()
    page.get_by_role("button", name="New conversation in the list").tap()
    expect(page.get_by_role("article")).to_have_count(0)
    toggle.tap()
    page.get_by_role("button", name=re.compile("^Hello")).tap()
    expect(navigation).to_be_hidden()
    expect(page.get_by_role("article", name="Answer")).to_have_count(1)
    assert not page.evaluate("document.querySelector('main').inert")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_wide_content_on_a_phone(opened: Any, shot: Any, scheme: str) -> None:
    """Long code, tables and formulas scroll for themselves; the page does not become wider."""
    page = opened(color_scheme=scheme, **PHONE)
    wait_ready(page)
    wide = "| " + " | ".join(f"column {i}" for i in range(12)) + " |\n" + "|---" * 12 + "|\n"
    formula = r"\[" + "+".join(f"x_{{{i}}}" for i in range(40)) + r"\]"
    answer_with(page, f"{wide}\n\n```python\n{'x = 1; ' * 40}\n```\n\n{formula}\n\n{'word' * 60}")
    send_message(page, "w" * 200)
    answer = last_answer(page)
    expect(answer.locator(".katex-display")).to_be_visible()
    shot(page, f"phone-wide-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.querySelector('#talk').scrollWidth <= innerWidth")
    for button in page.locator("#talk button:visible, header button:visible").all():
        box = button.bounding_box()
        assert box["x"] + box["width"] <= 360
        assert box["height"] >= 30
