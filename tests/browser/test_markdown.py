"""How answers are drawn: Markdown, math, code; what is loaded for it, and how long answers grow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.page_actions import expect, last_answer, send_message, wait_ready
from tests.browser.stubbed_answers import answer_with, event, finish, hold_answers, push

pytestmark = pytest.mark.browser

TABLE = """| left | middle | right |
|:-----|:------:|------:|
| a    | b      | 1     |
"""
TASKS = "- [x] grind\n- [ ] sift\n- plain"
NOTES = (
    "Mills are old[^1], and *useful*[^use].\n\n[^1]: Two thousand years.\n[^use]: For **flour**."
)
MATH = r"""Let \(a^2 + b^2 = c^2\) and $e^{i\pi}$; it costs $5 or $10.

\[
\int_0^1 x^2\,dx = \frac{1}{3}
\]

$$\sum_{k=1}^n k$$

A backslash: \\(no math\\), `\(code\)`, and \(\wrong{\).
"""
CODE = "```python\ndef grind(corn: str) -> int:\n    return 3  # flour\n```"


def shown(opened: Any, text: str) -> tuple[Any, Any]:
    page = opened()
    wait_ready(page)
    answer_with(page, text)
    send_message(page, "x")
    return page, last_answer(page).locator(".answer")


def growing(opened: Any, text: str) -> tuple[Any, Any]:
    """A page and its answer, which begins with the text and goes on."""
    page = opened()
    hold_answers(page)
    send_message(page, "x")
    push(page, event(text))
    return page, page.get_by_role("article", name="Answer").locator(".answer")


def loaded(page: Any) -> set[str]:
    names = page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
    return {name.rsplit("/", 1)[1] for name in names if "/vendor/" in name}


def test_columns_are_aligned(opened: Any) -> None:
    _, answer = shown(opened, TABLE)
    alignment = answer.locator("td").evaluate_all(
        "all => all.map((each) => getComputedStyle(each).textAlign)"
    )
    assert alignment == ["left", "center", "right"]
    assert answer.locator("th[scope=col]").all_inner_texts() == ["left", "middle", "right"]


def test_task_lists(opened: Any) -> None:
    _, answer = shown(opened, TASKS)
    boxes = answer.get_by_role("checkbox")
    expect(boxes).to_have_count(2)
    expect(boxes.nth(0)).to_be_checked()
    expect(boxes.nth(1)).not_to_be_checked()
    expect(boxes.nth(0)).to_have_accessible_name("Done")
    texts = [each.strip() for each in answer.locator("li").all_inner_texts()]
    assert texts == ["grind", "sift", "plain"]


def test_footnotes_lead_there_and_back(opened: Any, shot: Any) -> None:
    page, answer = shown(opened, NOTES)
    notes = answer.get_by_role("region", name="Footnotes").locator("li")
    expect(notes).to_have_count(2)
    expect(notes.nth(0)).to_contain_text("Two thousand years.")
    expect(notes.nth(1).locator("strong")).to_have_text("flour")
    answer.get_by_role("link", name="Footnote 2").click()
    expect(notes.nth(1)).to_be_focused()
    notes.nth(1).get_by_role("link", name="Back to the text").click()
    expect(answer.get_by_role("link", name="Footnote 2")).to_be_focused()
    shot(page, "footnotes")
    assert "#" not in page.url
    # another answer has notes of its own
    send_message(page, "again")
    last_answer(page, 2)
    ids = page.evaluate("[...document.querySelectorAll('article [id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids)) == 8


def test_math_is_drawn(opened: Any, shot: Any) -> None:
    page, answer = shown(opened, MATH)
    expect(answer.locator(".katex")).to_have_count(4)
    expect(answer.locator(".katex-display")).to_have_count(2)
    sources = answer.locator("annotation").all_text_contents()
    assert sources[:2] == ["a^2 + b^2 = c^2", r"e^{i\pi}"]
    expect(answer).to_contain_text("it costs $5 or $10.")
    expect(answer.locator("code").first).to_have_text(r"\(code\)")
    expect(answer.locator(".math.wrong")).to_have_text(r"\wrong{")
    fonts = "document.fonts.ready.then(() => [...document.fonts].some((font) => font.status === 'loaded'))"  # noqa: E501
    assert page.evaluate(fonts)
    shot(page, "math")


def test_formulas_get_no_power(opened: Any) -> None:
    """Commands that make links, load pictures or set attributes are refused."""
    page, answer = shown(
        opened,
        r"\(\href{javascript:alert(1)}{x}\) \(\includegraphics{https://evil.example/a.png}\) "
        r"\(\htmlStyle{color:red}{x}\) \(\htmlId{message}{x}\)",
    )
    expect(answer.locator(".katex, .math.wrong").first).to_be_visible()
    assert answer.locator("a, img").count() == 0
    assert page.locator("#message").count() == 1


def test_code_is_highlighted_and_copied(opened: Any, shot: Any) -> None:
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    wait_ready(page)
    answer_with(page, CODE)
    send_message(page, "x")
    code = last_answer(page).get_by_role("region", name="Code in python")
    expect(code.locator(".hl-keyword").first).to_have_text("def")
    expect(code.locator(".hl-comment")).to_have_text("# flour")
    expect(code).to_have_text("def grind(corn: str) -> int:\n    return 3  # flour")
    page.get_by_role("button", name="Copy the code").click()
    copied_text = page.evaluate("navigator.clipboard.readText()")
    assert copied_text == "def grind(corn: str) -> int:\n    return 3  # flour"
    shot(page, "code")


def test_libraries_are_loaded_when_they_are_needed(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    answer_with(page, "Plain **text**, `code` and\n\n```\nno language\n```", CODE, r"\(a\)")
    first = {"markdown-it.min.js", "markdown-it-footnote.min.js"}
    send_message(page, "text")
    last_answer(page)
    assert loaded(page) == first
    send_message(page, "code")
    expect(last_answer(page, 2).locator(".hl-keyword").first).to_be_visible()
    assert loaded(page) == {*first, "highlight.min.js"}
    send_message(page, "math")
    expect(last_answer(page, 3).locator(".katex")).to_be_visible()
    page.evaluate("document.fonts.ready")
    math = loaded(page) - first - {"highlight.min.js"}
    assert {"katex.min.js", "katex.min.css"} <= math
    assert all(name.endswith(".woff2") for name in math - {"katex.min.js", "katex.min.css"})


PARAGRAPHS = 400
COUNT_ELEMENTS = """(() => {
  const create = document.createElement.bind(document);
  window.created = 0;
  document.createElement = (...given) => { window.created++; return create(...given); };
})()"""


def test_a_long_answer_costs_its_length(opened: Any) -> None:
    """Finished blocks stay as they are: each element is made once, and those of the last block
    once more for each frame; not all of them for each frame.
    """
    page = opened()
    hold_answers(page)
    send_message(page, "x")
    expect(page.get_by_role("article", name="Answer")).to_have_count(1)
    page.evaluate(COUNT_ELEMENTS)
    frames = page.evaluate(
        """async (count) => {
          let frames = 0;
          for (let at = 0; at < count; at++) {
            window.push({ choices: [{ index: 0, delta: { content: `Paragraph **${at}** of it.\\n\\n` } }] });
            await new Promise(requestAnimationFrame);
            frames++;
          }
          return frames;
        }""",  # noqa: E501
        PARAGRAPHS,
    )
    answer = page.get_by_role("article", name="Answer").locator(".answer")
    expect(answer.locator("p")).to_have_count(PARAGRAPHS)
    created = page.evaluate("window.created")
    in_page = 2 * PARAGRAPHS  # p and strong
    assert frames == PARAGRAPHS
    assert in_page <= created < 6 * in_page
    finish(page)
    expect(last_answer(page).locator("strong").nth(PARAGRAPHS - 1)).to_have_text(
        str(PARAGRAPHS - 1)
    )


COUNT_SEARCHES = r"""(() => {
  const find = String.prototype.indexOf;
  window.searches = 0;
  String.prototype.indexOf = function (mark, from) {
    if (mark === "\\)" || mark === "\\]") window.searches++;
    return find.call(this, mark, from);
  };
})()"""


@pytest.mark.parametrize("mark", ["\\(", "\\["])
def test_formulas_without_an_end_cost_their_length(mark: str, opened: Any) -> None:
    """Each of thousands of marks once searched the rest of the text for its end: six seconds."""
    page = opened()
    wait_ready(page)
    page.evaluate(COUNT_SEARCHES)
    answer_with(page, f"x {mark}" * 5000)
    send_message(page, "x")
    expect(last_answer(page).locator(".answer")).to_contain_text("x ")
    assert 0 < page.evaluate("window.searches") < 50


def test_drawn_answers_stay_when_the_conversation_goes_on(opened: Any) -> None:
    """Their elements and what is selected; a long conversation is not drawn again and again."""
    page = opened()
    hold_answers(page)
    send_message(page, "x")
    push(page, event(f"{MATH}\n\n{CODE}"), event(finish="stop"))
    finish(page)
    expect(last_answer(page).locator(".katex").first).to_be_visible()
    send_message(page, "y")
    push(page, event("A second"))
    expect(page.get_by_role("article", name="Answer").last).to_contain_text("A second")
    page.evaluate("""() => {
      window.marked = [...document.querySelectorAll('.answer *')];
      document.activeElement.blur();
      getSelection().selectAllChildren(document.querySelector('.answer pre'));
    }""")
    selected = page.evaluate("String(getSelection())")
    assert len(selected) > 5
    finish(page)
    last_answer(page, 2)
    assert page.evaluate("window.marked.filter((each) => !each.isConnected).length") <= 1
    assert page.evaluate("String(getSelection())") == selected


def test_a_formula_is_drawn_once(opened: Any) -> None:
    """A paragraph that grows is made again for each frame; its formulas are copied."""
    page, answer = growing(opened, "First $a^2$.")
    expect(answer.locator(".katex")).to_have_count(1)
    page.evaluate("""() => {
      window.drawings = 0;
      const draw = katex.render;
      katex.render = (...given) => { window.drawings++; draw(...given); };
    }""")
    for part in (" Then $b^2$", ", $a^2$ and", " more."):
        push(page, event(part))
        expect(answer).to_contain_text(part.split("$")[-1].strip())
    finish(page)
    expect(last_answer(page).locator(".katex")).to_have_count(3)
    assert page.evaluate("window.drawings") == 1  # of b^2


def test_blocks_grow_without_being_made_again(opened: Any) -> None:
    """A finished paragraph and code that is being written keep their elements."""
    page, answer = growing(opened, "First paragraph.\n\n```python\nx = 1\n")
    code = answer.locator("pre code")
    expect(code).to_have_text("x = 1")
    page.evaluate("window.marked = [...document.querySelectorAll('.answer p, .answer pre')]")
    push(page, event("y = 2\n"))
    expect(code).to_have_text("x = 1\ny = 2")
    assert page.evaluate("window.marked.every((each) => each.isConnected)")
    expect(answer.locator(".hl-number")).to_have_count(0)
    push(page, event("```\n\nEnd"))
    expect(answer.locator(".hl-number")).to_have_count(2)
    push(page, event(" of it.[^1]\n\n[^1]: A note."))
    finish(page)
    expect(last_answer(page).get_by_role("region", name="Footnotes")).to_contain_text("A note.")
    expect(code).to_have_text("x = 1\ny = 2")
