"""Answers that a test writes: whole, through a route, or event by event while the page reads."""

from __future__ import annotations

import json
from typing import Any

from tests.browser.page_actions import wait_ready

CHAT = "**/v1/chat/completions"
HELD = """(() => {
  const real = window.fetch;
  window.bodies = [];
  window.fetch = (path, options) => {
    if (path !== "/v1/chat/completions") return real(path, options);
    window.bodies.push(JSON.parse(options.body));
    const stream = new ReadableStream({ start(controller) {
      const send = (text) => controller.enqueue(new TextEncoder().encode(`data: ${text}\\n\\n`));
      window.push = (...events) => events.forEach((event) => send(JSON.stringify(event)));
      window.finish = () => { send("[DONE]"); controller.close(); };
      options.signal.addEventListener("abort", () => controller.error(options.signal.reason));
    } });
    return Promise.resolve(new Response(stream, { status: 200 }));
  };
})()"""


def event(
    content: str | None = None,
    reasoning: str | None = None,
    calls: list[dict[str, Any]] | None = None,
    finish: str | None = None,
    usage: int | None = None,
) -> dict[str, Any]:
    """One event of a chat completion's stream, as the server writes it.

    usage: tokens of prompt and answer together, in an event without choices.
    """
    if usage is not None:
        counts = {"prompt_tokens": usage - 1, "completion_tokens": 1, "total_tokens": usage}
        return {"choices": [], "usage": counts}
    delta: dict[str, Any] = {}
    if content is not None:
        delta["content"] = content
    if reasoning is not None:
        delta["reasoning_content"] = reasoning
    if calls is not None:
        delta["tool_calls"] = calls
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def stream_of(*events: dict[str, Any], end: str = "data: [DONE]\n\n") -> dict[str, Any]:
    """A response of these events, for a route to fulfill."""
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in events) + end
    return {"status": 200, "content_type": "text/event-stream", "body": body}


def stream_response(*pieces: str, end: str = "data: [DONE]\n\n") -> dict[str, Any]:
    """A response of these pieces of text."""
    return stream_of(*(event(piece) for piece in pieces), end=end)


def respond_in_turn(page: Any, *responses: dict[str, Any]) -> list[Any]:
    """Give each request the next response; the last one again. Returns the bodies, as they come."""
    bodies: list[Any] = []

    def fulfill(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(**responses[min(len(bodies), len(responses)) - 1])

    page.route(CHAT, fulfill)
    return bodies


def answer_with(page: Any, *texts: str) -> list[Any]:
    """Answer with these texts, one for each request; the last one again. Returns the bodies."""
    end = event(finish="stop"), event(usage=100)
    return respond_in_turn(page, *(stream_of(event(text), *end) for text in texts))


def hold_answers(page: Any) -> None:
    """From now on the test writes answers with ``push`` and ``finish`` while the page reads."""
    page.context.add_init_script(HELD)
    page.reload()
    wait_ready(page)


def push(page: Any, *events: dict[str, Any]) -> None:
    page.evaluate("events => window.push(...events)", list(events))


def finish(page: Any) -> None:
    page.evaluate("window.finish()")
