"""docs/request-fields.md is what the request models give."""

from __future__ import annotations

from pathlib import Path

from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.compatibility_fields import list_compatibility_fields
from modelmill.serve.dialects.anthropic_schema import MessagesRequest
from modelmill.serve.dialects.llama_cpp_schema import InfillRequest
from modelmill.serve.responses_schema import CompactRequest
from modelmill.serve.strict_models import StrictModel
from tools import request_fields_page

ROOT = Path(__file__).resolve().parents[2]


def test_every_field_without_effect_is_on_the_page() -> None:
    text = (ROOT / request_fields_page.PAGE).read_text(encoding="utf-8")
    models: list[type[StrictModel]] = [ChatRequest, CompactRequest, InfillRequest, MessagesRequest]
    assert all(f"| `{name}` |" in text for name, _, _ in list_compatibility_fields(models))
    _, _, section = text.partition("## /completion and /infill")
    of_llama_cpp = section.partition("##")[0]
    for row in (
        "| `image_data` | an empty list | changes nothing |",
        "| `t_max_predict_ms` | any | n_predict limits the text |",
    ):
        assert row in of_llama_cpp, "it has another meaning there"
