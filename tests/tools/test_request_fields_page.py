"""docs/request-fields.md is what the request models give."""

from __future__ import annotations

from pathlib import Path

from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.peer_fields import field_rows
from tools import request_fields_page

ROOT = Path(__file__).resolve().parents[2]


def test_every_field_without_effect_is_on_the_page() -> None:
    text = (ROOT / request_fields_page.PAGE).read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name, _, _ in field_rows([ChatRequest]))
