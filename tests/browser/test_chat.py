"""Conversations on the page, in a real browser, with a real server."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.conftest import Engines
from tests.browser.page_actions import (
    STATS_PATTERN,
    WAIT,
    continue_answer,
    expect,
    last_answer,
    send_message,
    wait_ready,
)
from tests.browser.stubbed_answers import respond_in_turn, stream_response
from tests.serve.server_process import ServerProcess

pytestmark = pytest.mark.browser
SUGGESTED = {"temperature": 0.6, "top_p": 0.95, "top_k": 40, "min_p": 0.05}
LONG = '{"temperature": 0, "max_tokens": 1500}'


def endless(page: Any) -> None:
    """Answers continue until they are stopped: a small model might end before the test can."""

    def longer(route: Any) -> None:
        route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})

    page.route("**/v1/chat/completions", longer)


def test_a_conversation_typed_and_streamed(opened: Any, shot: Any) -> None:
    page = opened('{"temperature": 0, "max_tokens": 160}')
    wait_ready(page)
    shot(page, "welcome")
    sent: list[Any] = []
    page.on(
        "request",
        lambda each: sent.append(each.post_data_json) if "chat/completions" in each.url else None,
    )
    send_message(page, "Explain how a watermill works, with a list of its parts.")
    answer_text = page.get_by_role("article", name="Answer").locator(".said")
    expect(answer_text).to_have_text(re.compile(r"\w"), timeout=WAIT)
    last = last_answer(page)
    expect(last.locator(".figures")).to_have_text(STATS_PATTERN)
    first = last.locator(".said").inner_text()
    send_message(page, "Thanks. And three colours?")
    last_answer(page, 2)
    shot(page, "conversation")
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
    assert sent[1]["messages"][1]["content"][:10] == first[:10]
    assert sent[1]["stream"] is True
    assert sent[1]["temperature"] == 0
    # it is there after a reload, and a new conversation leaves it in the list
    page.reload()
    expect(page.get_by_role("article", name="Answer")).to_have_count(2)
    page.get_by_role("button", name="New conversation", exact=True).click()
    expect(page.get_by_role("article")).to_have_count(0)
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    page.get_by_role("navigation").get_by_role("button", name=re.compile("^Explain how")).click()
    expect(page.get_by_role("article", name="Answer")).to_have_count(2)


@pytest.mark.parametrize("stop_by", ["button", "Escape"])
def test_an_answer_is_stopped(opened: Any, server: ServerProcess, shot: Any, stop_by: str) -> None:
    page = opened(LONG)
    endless(page)
    wait_ready(page)
    send_message(page, "Count from one to five hundred in words.")
    expect(page.get_by_role("article", name="Answer").locator(".said")).to_have_text(
        re.compile(r"\w"), timeout=WAIT
    )
    if stop_by == "button":
        page.get_by_role("button", name="Stop", exact=True).click()
    else:
        page.keyboard.press("Escape")
    last = last_answer(page)
    expect(last.locator(".note")).to_have_text("Stopped.")
    assert last.locator(".said").inner_text()
    server.wait_idle()  # the engine works for it no longer
    if stop_by == "button":
        shot(page, "stopped")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_regenerate_and_edit(opened: Any) -> None:
    page = opened('{"temperature": 0, "max_tokens": 12}')
    wait_ready(page)
    send_message(page, "Say hello.")
    first = last_answer(page).locator(".said").inner_text()
    send_message(page, "Say goodbye.")
    last_answer(page, 2)
    page.get_by_role("article", name="Answer").nth(0).get_by_role(
        "button", name="Regenerate this answer"
    ).click()
    # what came after it is gone; greedy, the text is the same
    assert last_answer(page, 1).locator(".said").inner_text() == first
    page.get_by_role("button", name="Edit this message").first.click()
    field = page.get_by_label("Edit the message")
    expect(field).to_have_value("Say hello.")
    field.press("Escape")
    expect(page.get_by_role("article", name="You")).to_have_text(re.compile("Say hello."))
    page.get_by_role("button", name="Edit this message").first.click()
    page.get_by_label("Edit the message").fill("Say one word about rain.")
    page.get_by_role("button", name="Send the edited message").click()
    last_answer(page, 1)
    expect(page.get_by_role("article", name="You")).to_have_text(
        re.compile("^Say one word about rain.")
    )


def test_with_the_keyboard_alone(opened: Any) -> None:
    """Nothing is clicked: the message, a stop, an edit, the settings, the tabs."""
    page = opened(LONG)
    endless(page)
    wait_ready(page)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the message field")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    if not page.evaluate("document.activeElement.id === 'message'"):
        page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("Write a long story")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("about rain")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Write a long story\nabout rain")
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="Answer").locator(".said")).to_have_text(
        re.compile(r"\w"), timeout=WAIT
    )
    page.keyboard.press("Escape")
    last_answer(page)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Edit the message")).to_be_focused()
    page.keyboard.press("Escape")
    for _ in range(30):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.id") == "open-settings":
            break
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Settings")
    expect(dialog).to_be_visible()
    assert page.evaluate("document.querySelector('dialog').contains(document.activeElement)")
    page.get_by_label("System prompt").focus()
    page.keyboard.type("Answer in French.")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Settings", exact=True)).to_be_focused()
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Segment")).to_be_focused()
    expect(page.get_by_role("button", name="Choose a photo")).to_be_visible()


def test_the_settings_show_how_an_answer_is_drawn_by_default(opened: Any) -> None:
    """The checkpoint says nothing: people get our defaults, as a group, and see them."""
    page = opened(sampling='{"max_tokens": 5}')
    wait_ready(page)
    page.get_by_role("button", name="Settings", exact=True).click()
    temperature = page.get_by_label("Temperature", exact=True)
    expect(temperature).to_have_attribute("placeholder", "0.6")
    expect(page.get_by_label("Top-k", exact=True)).to_have_attribute("placeholder", "40")
    expect(page.get_by_label("Seed", exact=True)).to_have_attribute("placeholder", "default")
    expect(page.get_by_text("Left empty: temperature 0.6")).to_be_visible()
    cases = (("1.2", "default", {"temperature": 1.2}), ("", "40", SUGGESTED))
    for count, (typed, shown, sent) in enumerate(cases, 1):
        temperature.fill(typed)
        expect(page.get_by_label("Top-k", exact=True)).to_have_attribute("placeholder", shown)
        page.get_by_role("button", name="Done").click()
        with page.expect_request("**/v1/chat/completions") as request_info:
            send_message(page, "Hello")
        placeholders = {
            name: value
            for name, value in request_info.value.post_data_json.items()
            if name in SUGGESTED
        }
        assert placeholders == sent
        last_answer(page, count)
        page.get_by_role("button", name="Settings", exact=True).click()


def test_settings_reach_the_request(opened: Any, shot: Any) -> None:
    page = opened()
    wait_ready(page)
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("System prompt").fill("You are a pirate.")
    for label, value in (
        ("Temperature", "0.5"),
        ("Top-p", "0.9"),
        ("Top-k", "20"),
        ("Max tokens", "5"),
        ("Seed", "7"),
    ):
        page.get_by_label(label, exact=True).fill(value)
    shot(page, "settings")
    page.get_by_role("button", name="Done").click()
    with page.expect_request("**/v1/chat/completions") as request_info:
        send_message(page, "Hello")
    body = request_info.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "You are a pirate."}
    sampling = {
        name: body[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")
    }
    assert sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "max_tokens": 5, "seed": 7}
    last_answer(page)
    page.reload()
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(page.get_by_label("Seed", exact=True)).to_have_value("7")
    page.get_by_role("button", name="Defaults").click()
    expect(page.get_by_label("Seed", exact=True)).to_have_value("")
    page.get_by_label("Appearance").select_option("dark")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


def luminance(rgb: str) -> float:
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", rgb)[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_in_the_light_and_in_the_dark(opened: Any, shot: Any, scheme: str) -> None:
    """Nothing sticks out, everything can be hit with a thumb, and words stand out from their ground
    (WCAG AA).
    """
    page = opened(
        viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True, is_mobile=True
    )
    wait_ready(page)
    page.get_by_label("Message", exact=True).fill("Show me two lines of Python code.")
    page.get_by_role("button", name="Send", exact=True).tap()
    last_answer(page)
    shot(page, f"phone-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for button in page.locator("header button:visible, #composer button:visible").all():
        box = button.bounding_box()
        assert min(box["width"], box["height"]) >= 34
        assert box["x"] + box["width"] <= 360
    ground = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert ground < 0.05 if scheme == "dark" else ground > 0.8
    for place in (".answer", ".foot button", ".figures", "article.user .said"):
        text = luminance(page.locator(place).first.evaluate("each => getComputedStyle(each).color"))
        ratio = (max(text, ground) + 0.05) / (min(text, ground) + 0.05)
        assert ratio >= 4.5, (place, ratio)
    page.get_by_role("button", name="Settings", exact=True).tap()
    expect(page.get_by_role("button", name="Done")).to_be_visible()
    shot(page, f"phone-{scheme}-settings")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


HOSTILE = """# Title <script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 2"> ![pixel](http://evil.example/pixel.png) **bold _and_ `code <b>`**

- one [bad](javascript:window.hacked=3) [data](data:text/html,<script>1</script>) [good](https://example.org/a_(b))
  - nested
- two https://example.org.

1. first
2. second

| a | b |
|---|---|
| <i>x</i> | `y` |

> quoted
> on

```html
<script>window.hacked = 4</script>
```
"""  # noqa: E501


def test_what_a_model_writes_stays_text(opened: Any, shot: Any) -> None:
    page = opened()
    wait_ready(page)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**stream_response(*HOSTILE)))
    send_message(page, "x")
    answer_text = last_answer(page).locator(".said")
    assert page.evaluate("window.hacked") is None
    for tag in ("img", "script", "iframe", "i", "b", "style"):
        assert answer_text.locator(tag).count() == 0, tag
    links = answer_text.locator("a").evaluate_all(
        "all => all.map(a => [a.getAttribute('href'), a.rel, a.target])"
    )
    link_attributes = ["noopener noreferrer", "_blank"]
    assert links == [
        ["http://evil.example/pixel.png", *link_attributes],
        ["https://example.org/a_(b)", *link_attributes],
        ["https://example.org/", *link_attributes],
    ]
    assert answer_text.locator("pre code").inner_text() == "<script>window.hacked = 4</script>"
    assert answer_text.locator("ul ul li").inner_text() == "nested"
    assert answer_text.locator("ol li").all_inner_texts() == ["first", "second"]
    assert answer_text.locator("td").all_inner_texts() == ["<i>x</i>", "y"]
    assert answer_text.locator("blockquote").inner_text() == "quoted\non"
    assert answer_text.locator("strong code").inner_text() == "code <b>"
    assert "<script>" in answer_text.locator("h2").inner_text()
    shot(page, "markdown")


def test_odd_texts_break_nothing(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    odd = ["*" * 3000, "`" * 3001, "[" * 2000, "> " * 300 + "x", "- " * 300, "|" * 500 + "\n|-|",
        "**a" * 500, "```",
           "1. " * 200, "https://" * 100, "<think>why</think>because", "<think>unended", "\\*",
           "~~" * 99]  # fmt: skip
    messages: list[str] = []
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(**stream_response(messages[-1]))
    )
    for count, text in enumerate(odd, 1):
        messages.append(text)
        send_message(page, "x")
        last_answer(page, count)
    thought = page.get_by_role("article", name="Answer").nth(10)
    assert thought.locator("summary").inner_text() == "Thoughts"
    assert thought.locator(".answer").inner_text() == "because"


RESTARTED = '{"error": {"code": "engine_restarted", "message": "m"}}'


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ({"status": 429, "body": "{}"}, "The server is busy. Try again in a moment."),
        ({"status": 500, "body": "<html>"}, "The server made a mistake. Its log says more."),
        ({"status": 503, "body": '{"error": {"code": "not_ready", "message": "m"}}'},
        "The model is not ready yet."),
        ({"status": 400, "body": '{"error": {"code": "context_length_exceeded", "message": "m"}}'},
         "The conversation has become longer than the model can take. Shorten it, or start a new "
         "one."),
        ({"status": 400, "body": '{"error": {"code": null, "message": "top_k must be whole"}}'},
        "top_k must be whole"),
        (stream_response("Half an", end=""), "The answer broke off: the connection was lost."),
        (stream_response("Half", end=f"data: {RESTARTED}\n\n"),
         "The model stopped while it answered, and is being started again."),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)  # fmt: skip
def test_errors_are_reported_in_plain_words(
    opened: Any, error: dict[str, Any], message: str
) -> None:
    page = opened()
    wait_ready(page)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**error))
    send_message(page, "Hello")
    expect(last_answer(page).locator(".note.bad")).to_have_text(message)
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Regenerate this answer").click()
    expect(last_answer(page).locator(".figures")).to_have_text(STATS_PATTERN, timeout=WAIT)


def test_a_server_that_is_gone(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    page.context.set_offline(True)
    send_message(page, "Hello")
    expect(last_answer(page).locator(".note.bad")).to_have_text("The server cannot be reached.")
    expect(page.locator("#banner")).to_have_text(re.compile("cannot be reached"))
    page.context.set_offline(False)
    expect(page.locator("#banner")).to_be_hidden(timeout=WAIT)


def test_loading_is_shown_and_a_key_is_asked_for(opened: Any, engines: Engines, shot: Any) -> None:
    with ServerProcess(
        engines.language_engine, "--api-key", "sesame", ready=False, flags=engines.flags
    ) as serving:
        page = opened(url=serving.url)
        dialog = page.get_by_role("dialog", name="Settings")
        expect(dialog).to_be_visible()
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill("sesame")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        banner = page.locator("#banner")
        if serving.request("/health")[0] == 503:
            expect(banner).to_have_text(re.compile("is loading|^$"))
            shot(page, "loading")
        wait_ready(page)
        send_message(page, "Hello")
        expect(last_answer(page).locator(".figures")).to_have_text(STATS_PATTERN)
        # one kind of engine only: no tabs
        expect(page.get_by_role("tablist")).to_be_hidden()


def test_everything_has_a_name(opened: Any) -> None:
    """What can be operated says what it is, to those who cannot see it."""
    page = opened()
    wait_ready(page)
    nameless = page.evaluate("""() => [...document.querySelectorAll('button, input, select, textarea, canvas, [role]')]
        .filter(each => !each.closest('[aria-hidden=true]'))
        .filter(each => !(each.getAttribute('aria-label') || each.labels?.length || each.textContent.trim()
            || each.getAttribute('aria-labelledby') || ['status', 'alert'].includes(each.getAttribute('role'))))
        .map(each => each.outerHTML.slice(0, 100))""")  # noqa: E501
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("log", name="Conversation").count() == 1


def test_an_answer_that_failed_is_no_turn(opened: Any) -> None:
    page = opened('{"temperature": 0, "max_tokens": 8}')
    wait_ready(page)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=500, body="<html>"))
    send_message(page, "Hello")
    expect(last_answer(page).locator(".note.bad")).to_be_visible()
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as request_info:
        send_message(page, "Say hi")
    messages = request_info.value.post_data_json["messages"]
    assert [(each["role"], each["content"]) for each in messages] == [
        ("user", "Hello"),
        ("user", "Say hi"),
    ]
    expect(last_answer(page, 2).locator(".figures")).to_have_text(STATS_PATTERN, timeout=WAIT)


def test_an_answer_that_broke_off_is_continued(opened: Any) -> None:
    """The server was restarted: what is shown of the answer counts, and can be gone on with."""
    page = opened()
    wait_ready(page)
    bodies = respond_in_turn(page, stream_response("The wheel ", end=""), stream_response("turns."))
    answer = continue_answer(page, "broke off")
    expect(answer.locator(".note.bad")).to_have_count(0)
    assert bodies[1]["continue_final_message"] is True
    assert bodies[1]["messages"][-1] == {"role": "assistant", "content": "The wheel "}
    send_message(page, "And then?")
    last_answer(page, 2)
    assert [each["content"] for each in bodies[2]["messages"]] == [
        "What does it do?", "The wheel turns.", "And then?",
    ]  # fmt: skip


def test_a_model_without_a_chat_template_says_so(opened: Any) -> None:
    """The list of models as such a server gives it."""

    def silent(route: Any) -> None:
        answer = route.fetch()
        card = answer.json()
        route.fulfill(
            response=answer,
            json={**card, "data": [{**each, "chat": False} for each in card["data"]]},
        )

    page = opened()
    page.route("**/v1/models", silent)
    page.reload()
    field = page.get_by_label("Message", exact=True)
    expect(field).to_be_disabled()
    expect(field).to_have_attribute(
        "placeholder", re.compile("no chat template: ask it at /v1/completions")
    )
