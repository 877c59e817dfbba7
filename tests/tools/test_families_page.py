"""docs/families.md is what the families' files give."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.core.registry import module_names
from tools import families_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_the_repository_is_fresh() -> None:
    assert not families_page.stale(ROOT), "run `make families` and commit what it writes"


def test_every_family_is_on_the_page() -> None:
    text = (ROOT / families_page.PAGE).read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in module_names("modelmill.models"))


def test_a_changed_page_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert families_page.main(["--root", str(tmp_path)]) == 0
    assert families_page.main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / families_page.PAGE).write_text("changed")
    assert families_page.main(["--root", str(tmp_path), "--check"]) == 1
    assert "docs/families.md is stale; run `make families`" in capsys.readouterr().err
