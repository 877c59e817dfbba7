"""A stop string ends the content, not the thinking, in every dialect that tells them apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelmill.text.detokenizer import Detokenizer
from tests.serve.dialect_calls import events
from tests.serve.service_thread import ServiceThread

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if false %}<think>\n</think>{% endif %}"
)
WRITTEN = "<think>\nIs it Q: or A:?\n</think>\n\nYes. Q: no more."
THINKING, CONTENT = "Is it Q: or A:?", "Yes."
ASK = {"model": "stories", "messages": [{"role": "user", "content": "Hi"}]}
LIMITED = {**ASK, "max_tokens": 60}


@pytest.fixture
def thinker(
    running: ServiceThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceThread]:
    """The service with a template that thinks; the model's text is replaced, 3 letters a token."""
    path = tmp_path / "thinking.jinja"
    path.write_text(TEMPLATE)

    def push(self: Any, _: int) -> str:
        self.place = getattr(self, "place", -3) + 3
        return WRITTEN[self.place : self.place + 3]

    monkeypatch.setattr(Detokenizer, "push", push)
    with running.other_template(str(path)):
        yield running


def test_chat(thinker: ServiceThread) -> None:
    body = {**LIMITED, "stop": ["Q:"]}
    [choice] = thinker.post("/v1/chat/completions", body).json["choices"]
    assert choice["message"]["reasoning_content"].strip() == THINKING
    assert choice["message"]["content"].strip() == CONTENT
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Q:")
    assert "no more" in str(thinker.post("/v1/chat/completions", LIMITED).json)
    stream = thinker.post("/v1/chat/completions", {**body, "stream": True}).body
    deltas = [event["choices"][0]["delta"] for _, event in events(stream)]
    assert "".join(each.get("reasoning_content", "") for each in deltas).strip() == THINKING
    assert "".join(each.get("content") or "" for each in deltas).strip() == CONTENT


def test_anthropic(thinker: ServiceThread) -> None:
    answer = thinker.post("/v1/messages", {**LIMITED, "stop_sequences": ["Q:"]}).json
    blocks = {block["type"]: block for block in answer["content"]}
    assert blocks["thinking"]["thinking"].strip() == THINKING
    assert blocks["text"]["text"].strip() == CONTENT
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Q:")


def test_ollama(thinker: ServiceThread) -> None:
    body = {**ASK, "stream": False, "options": {"stop": ["Q:"], "num_predict": 60}}
    message = thinker.post("/api/chat", body).json["message"]
    assert (message["thinking"].strip(), message["content"].strip()) == (THINKING, CONTENT)


def test_raw_text_has_no_thinking(thinker: ServiceThread) -> None:
    body = {"model": "stories", "prompt": "Hi", "max_tokens": 60, "stop": ["Q:"]}
    [choice] = thinker.post("/v1/completions", body).json["choices"]
    assert choice["text"].endswith("Is it ")
    assert choice["stop_reason"] == "Q:"
