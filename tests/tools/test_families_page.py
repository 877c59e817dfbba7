"""docs/families.md is what the families' files give."""

from __future__ import annotations

from pathlib import Path

from modelmill.core.module_lookup import list_module_names
from tools import families_page

ROOT = Path(__file__).resolve().parents[2]


def test_every_family_is_on_the_page() -> None:
    text = (ROOT / families_page.PAGE).read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in list_module_names("modelmill.models"))
