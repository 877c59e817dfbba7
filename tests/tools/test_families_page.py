"""docs/families.md is what the families' files give."""

from __future__ import annotations

from pathlib import Path

from modelmill.core.registry import module_names
from tools import families_page
from tools.generated_page import stale_pages

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_the_repository_is_fresh() -> None:
    assert not stale_pages(ROOT, families_page.render()), (
        "run `make families` and commit what it writes"
    )


def test_every_family_is_on_the_page() -> None:
    text = (ROOT / families_page.PAGE).read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in module_names("modelmill.models"))
