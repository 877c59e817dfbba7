"""docs/request-fields.md is what the request models give."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.serve.peer_fields import field_rows
from modelmill.serve.schema import ChatRequest
from tools import request_fields_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_the_repository_is_fresh() -> None:
    assert not request_fields_page.stale(ROOT), "run `make request-fields` and commit the page"


def test_every_field_without_effect_is_on_the_page() -> None:
    text = (ROOT / request_fields_page.PAGE).read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in text for name, _, _ in field_rows([ChatRequest]))


def test_a_changed_page_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert request_fields_page.main(["--root", str(tmp_path)]) == 0
    assert request_fields_page.main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / request_fields_page.PAGE).write_text("changed")
    assert request_fields_page.main(["--root", str(tmp_path), "--check"]) == 1
    assert "docs/request-fields.md is stale" in capsys.readouterr().err
