"""Orders of roles that a chat template refuses: answered, and said in every dialect's warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelmill.text.role_order import JOINED_MESSAGES_WARNINGS, LATE_SYSTEM_WARNING
from tests.serve.service_thread import ServiceThread

# as Mistral's and Gemma 3's: one system message, then user and assistant in turn
STRICT = (
    "{% set shift = 1 if messages[0].role == 'system' else 0 %}{% for m in messages %}"
    "{% if loop.index0 >= shift and (m.role == 'user') != ((loop.index0 - shift) % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
ANSWERS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "I look."},
    {"role": "assistant", "content": "It is there."},
    {"role": "user", "content": "Where?"},
]
LATE = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "system", "content": "Be brief."},
]
SHORT = {"model": "stories", "max_tokens": 2}
CASES = {
    "chat": ("/v1/chat/completions", {**SHORT}, "messages"),
    "responses": ("/v1/responses", {"model": "stories", "max_output_tokens": 2}, "input"),
    "anthropic": ("/v1/messages", {**SHORT}, "messages"),
    "ollama": (
        "/api/chat",
        {"model": "stories", "stream": False, "options": {"num_predict": 2}},
        "messages",
    ),
}


@pytest.fixture
def strict(running: ServiceThread, tmp_path: Path) -> Any:
    """The service with a template that wants the roles to alternate."""
    path = tmp_path / "strict.jinja"
    path.write_text(STRICT)
    with running.other_template(str(path)):
        yield running


@pytest.mark.parametrize("dialect", CASES)
@pytest.mark.parametrize(
    ("messages", "line"),
    [(ANSWERS, JOINED_MESSAGES_WARNINGS["assistant"]), (LATE, LATE_SYSTEM_WARNING)],
)
def test_what_was_done_is_in_the_warnings(
    strict: ServiceThread, dialect: str, messages: list[dict[str, Any]], line: str
) -> None:
    path, body, field = CASES[dialect]
    answer = strict.post(path, {**body, field: messages})
    assert answer.status == 200, answer.body
    if (dialect, messages) == ("anthropic", ANSWERS):  # this API itself makes one turn of them
        assert "warnings" not in answer.json
        return
    line = line.replace("messages", field, 1)
    assert answer.json["warnings"] == [line]
    streamed = strict.post(path, {**body, field: messages, "stream": True})
    assert line in streamed.body.decode()
    plain = strict.post(path, {**body, field: messages[:1]}).json
    assert not plain.get("warnings")


def test_the_texts_reach_the_template(strict: ServiceThread) -> None:
    shown = strict.post("/apply-template", {"messages": ANSWERS})
    assert shown.json == {"prompt": "[user]Hi[assistant]I look.\n\nIt is there.[user]Where?"}
