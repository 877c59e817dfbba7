"""Thinking, tool calls, cut answers, the context meter and the settings that requests carry."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.browser.page_actions import (
    continue_answer,
    expect,
    last_answer,
    send_message,
    wait_ready,
)
from tests.browser.stubbed_answers import (
    CHAT,
    answer_with,
    event,
    finish,
    hold_answers,
    push,
    respond_in_turn,
    stream_of,
)

pytestmark = pytest.mark.browser
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}


def settings(page: Any, **fields: str) -> None:
    """Fill fields of the settings by their ids, with _ for -."""
    page.get_by_role("button", name="Settings", exact=True).click()
    for name, value in fields.items():
        field = page.locator(f"#{name.replace('_', '-')}")
        if field.evaluate("each => each.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    page.get_by_role("button", name="Done").click()


def answer_in_turn(page: Any, answers: list[list[Any]]) -> list[Any]:
    """Answer each request by the next list of events; returns the bodies, as they come."""
    return respond_in_turn(page, *(stream_of(*events) for events in answers))


def test_thinking_is_folded_and_timed(opened: Any, shot: Any) -> None:
    page = opened()
    hold_answers(page)
    send_message(page, "Which is larger?")
    push(page, event(reasoning="Let me *compare* "), event(reasoning="them."))
    answer = page.get_by_role("article", name="Answer")
    summary = answer.locator("summary")
    expect(summary).to_have_text("Thinking …")
    expect(answer.get_by_text("compare")).to_be_hidden()
    summary.click()
    expect(answer.locator(".thinking em")).to_have_text("compare")
    shot(page, "thinking")
    push(page, event("The first one."))
    expect(summary).to_have_text(re.compile(r"^Thought for \d+(\.\d)? s$"))
    finish(page)
    last_answer(page)
    expect(answer.locator(".answer")).to_have_text("The first one.")
    expect(answer.get_by_text("compare")).to_be_visible()  # as the user left it
    page.reload()
    expect(answer.locator("summary")).to_have_text(re.compile(r"^Thought for \d+(\.\d)? s$"))
    expect(answer.get_by_text("compare")).to_be_hidden()
    send_message(page, "And the second?")
    sent = page.evaluate("window.bodies.at(-1).messages[1]")
    assert sent["reasoning_content"] == "Let me *compare* them."
    assert sent["content"] == "The first one."


@pytest.mark.parametrize(("choice", "sent"), [("", None), ("on", True), ("off", False)])
def test_the_thinking_switch(opened: Any, choice: str, sent: bool | None) -> None:
    page = opened()
    wait_ready(page)
    bodies = answer_with(page, "Yes.")
    if choice:
        settings(page, thinking=choice)
    send_message(page, "Hello")
    last_answer(page)
    expected = None if sent is None else {"enable_thinking": sent}
    assert bodies[0].get("chat_template_kwargs") == expected


def test_calls_are_shown_and_answered(opened: Any, shot: Any) -> None:
    page = opened()
    wait_ready(page)
    settings(page, tools=json.dumps([WEATHER]))
    answers = [
        [
            event("I will look."),
            event(calls=[{"index": 0, "id": "c1", "function": {"name": "get_weather"}}]),
            event(calls=[{"index": 0, "function": {"arguments": '{"town": '}}]),
            event(calls=[{"index": 0, "function": {"arguments": '"Ulm"}'}}]),
            event(
                calls=[
                    {
                        "index": 1,
                        "id": "c2",
                        "function": {"name": "get_weather", "arguments": '{"town": "Bern"}'},
                    }
                ]
            ),
            event(finish="tool_calls"),
        ],
        [event("Rain in Ulm, sun in Bern."), event(finish="stop")],
    ]

    bodies = answer_in_turn(page, answers)
    send_message(page, "How is the weather?")
    answer = last_answer(page)
    assert bodies[0]["tools"] == [{"type": "function", "function": WEATHER}]
    cards = answer.get_by_role("region", name="Call of get_weather")
    expect(cards).to_have_count(2)
    expect(cards.nth(0).locator("pre")).to_have_text('{\n  "town": "Ulm"\n}')
    shot(page, "tool-calls")
    fields = page.get_by_label("Result of get_weather")
    fields.nth(0).fill("rain, 8 °C")
    fields.nth(1).fill("sun, 12 °C")
    shot(page, "tool-results")
    page.get_by_role("button", name="Send results").click()
    expect(last_answer(page, 2).locator(".answer")).to_have_text("Rain in Ulm, sun in Bern.")
    expect(page.get_by_role("article", name="Result of get_weather")).to_have_count(2)
    roles = [message["role"] for message in bodies[1]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool"]
    assistant, first, second = bodies[1]["messages"][1:]
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert assistant["tool_calls"][0]["function"]["arguments"] == '{"town": "Ulm"}'
    assert first == {"role": "tool", "tool_call_id": "c1", "content": "rain, 8 °C"}
    assert second == {"role": "tool", "tool_call_id": "c2", "content": "sun, 12 °C"}
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": "[{"}, "The tools in the settings must be JSON"),
        ({"tools": "[{}]"}, "Each tool in the settings needs a name."),
        ({"format": "json_schema", "schema": "{"}, "The schema in the settings must be JSON"),
        ({"stop_strings": "\n".join("abcdefgh" * 9)}, "There are 72 stop strings; the limit is 64"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_sent(
    opened: Any, fields: dict[str, str], message: str
) -> None:
    page = opened()
    wait_ready(page)
    bodies = answer_with(page, "Yes.")
    settings(page, **fields)
    send_message(page, "Hello")
    expect(page.locator("#trouble-text")).to_contain_text(message)
    field = list(fields)[-1].replace("_", "-")
    expect(page.locator(f"#{field}")).to_be_focused()
    expect(page.locator(f"#{field}")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(f"#{field}-problem")).to_contain_text(message)
    assert bodies == []
    page.keyboard.press("Escape")
    expect(page.get_by_label("Message", exact=True)).to_have_value("Hello")


def test_stop_strings_and_a_schema_reach_the_request(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    bodies = answer_with(page, "{}")
    schema = {"type": "object", "properties": {"town": {"type": "string"}}}
    settings(page, stop_strings="END\n\\n\\n\n", format="json_schema", schema=json.dumps(schema))
    send_message(page, "Hello")
    last_answer(page)
    assert bodies[0]["stop"] == ["END", "\n\n"]
    assert bodies[0]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema},
    }
    settings(page, format="json_object", stop_strings="")
    send_message(page, "Again")
    last_answer(page, 2)
    assert bodies[1]["response_format"] == {"type": "json_object"}
    assert "stop" not in bodies[1]


def test_a_real_server_takes_these_settings(opened: Any) -> None:
    """A schema and a stop string, served: the answer is JSON that matches the schema."""
    page = opened('{"temperature": 0, "max_tokens": 40}')
    wait_ready(page)
    settings(page, format="json_schema", schema='{"const": "flour"}', stop_strings="never this")
    send_message(page, "Hello")
    expect(last_answer(page).locator(".answer")).to_have_text('"flour"')


def test_a_call_that_broke_off_is_not_answered(opened: Any) -> None:
    """Its arguments are half a JSON: they are shown, and never sent."""
    page = opened()
    wait_ready(page)
    half = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Par'}}
    answers = [
        [event("Let me see."), event(calls=[half]), event(finish="length")],
        [event("Fine."), event(finish="stop")],
    ]
    bodies = answer_in_turn(page, answers)
    send_message(page, "How is the weather?")
    answer = last_answer(page)
    expect(answer.locator(".tool-call")).to_contain_text('{"city": "Par')
    expect(page.locator(".tool-results")).to_have_count(0)
    send_message(page, "Well?")
    last_answer(page, 2)
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "Let me see."}


def test_an_answer_that_was_cut_is_continued(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    answers = [
        [event("The wheel "), event(finish="length")],
        [event("turns."), event(finish="stop")],
    ]
    bodies = answer_in_turn(page, answers)
    answer = continue_answer(page, "reached the maximum of tokens")
    expect(answer.locator(".note")).to_have_count(0)
    expect(answer.get_by_role("button", name="Continue this answer")).to_have_count(0)
    assert bodies[1]["continue_final_message"] is True
    assert bodies[1]["add_generation_prompt"] is False
    assert bodies[1]["messages"][-1] == {"role": "assistant", "content": "The wheel "}
    assert "continue_final_message" not in bodies[0]


def test_an_answer_that_was_cut_in_its_thinking_is_continued(opened: Any) -> None:
    page = opened()
    wait_ready(page)
    answers = [
        [event(reasoning="It rolls"), event(finish="length")],
        [event(reasoning=" well."), event("The wheel turns."), event(finish="stop")],
    ]
    bodies = answer_in_turn(page, answers)
    continue_answer(page, "reached the maximum of tokens")
    assert bodies[1]["continue_final_message"] is True
    last = {"role": "assistant", "content": "", "reasoning_content": "It rolls"}
    assert bodies[1]["messages"][-1] == last


def test_a_real_server_continues(opened: Any) -> None:
    """Greedy: the rest is what a longer answer had said."""
    page = opened('{"temperature": 0, "max_tokens": 24}')
    wait_ready(page)
    send_message(page, "Tell me about a dog.")
    answer = last_answer(page)
    long = answer.locator(".answer").inner_text()
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Max tokens").fill("12")
    page.get_by_role("button", name="Done").click()
    answer.get_by_role("button", name="Regenerate this answer").click()
    expect(answer.locator(".branches")).to_have_text("2 / 2")
    short = last_answer(page).locator(".answer").inner_text()
    assert len(short) < len(long)
    answer.get_by_role("button", name="Continue this answer").click()
    expect(answer.get_by_role("button", name="Copy this answer")).to_be_visible()
    assert last_answer(page).locator(".answer").inner_text()[:60] == long[:60]


def test_the_context_meter(opened: Any, shot: Any) -> None:
    page = opened()
    wait_ready(page)
    length = page.evaluate(
        "fetch('/v1/models').then((r) => r.json()).then((list) => list.data[0].max_model_len)"
    )
    meter = page.get_by_role("meter")
    expect(meter).to_be_hidden()
    bodies = answer_with(page, "Short.")
    send_message(page, "Hello")
    last_answer(page)
    assert bodies[0]["stream_options"] == {"include_usage": True}
    expect(page.locator("#context-text")).to_have_text(f"100 of {length:,} tokens of context")
    expect(meter).to_have_accessible_name(f"100 of {length:,} tokens of context")
    expect(page.locator("#context")).not_to_have_class("full")
    page.unroute(CHAT)
    nearly = stream_of(event("Long."), event(finish="stop"), event(usage=length - 5))
    page.route(CHAT, lambda route: route.fulfill(**nearly))
    send_message(page, "More")
    last_answer(page, 2)
    expect(page.locator("#context")).to_have_class("full")
    shot(page, "context-full")
    page.get_by_role("button", name="New conversation", exact=True).click()
    expect(meter).to_be_hidden()


def test_announcements_follow_the_stream(opened: Any) -> None:
    """Screen readers hear each block once, when it is finished; not each token."""
    page = opened()
    hold_answers(page)
    send_message(page, "x")
    voice = page.locator("#voice")
    expect(voice).to_have_text("Answering")
    push(page, event("One paragraph.\n\nAnother "))
    expect(voice.locator("p")).to_have_text(["One paragraph."])
    push(page, event("one.\n\nThe last"))
    expect(voice.locator("p")).to_have_text(["One paragraph.", "Another one."])
    finish(page)
    expect(voice.locator("p")).to_have_text(["One paragraph.", "Another one.", "The last"])
