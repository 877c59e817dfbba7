"""docs/families.md is what the families' files give."""

from __future__ import annotations

from pathlib import Path

from modelmill.core.module_lookup import list_module_names
from tools import families_page

ROOT = Path(__file__).resolve().parents[2]


def test_every_family_is_on_the_page() -> None:
    text = (ROOT / families_page.PAGE).read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in list_module_names("modelmill.models"))


def test_a_family_without_a_gguf_says_why() -> None:
    [page] = families_page.render().values()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    without = [row for row in rows if "| –" in row]
    assert without
    reasons = families_page.WITHOUT_GGUF
    assert all("| – (" in row or reasons[row.split("`")[1]] == "" for row in without)
    assert not [name for name in families_page.WITHOUT_GGUF if f"| `{name}` |" not in page]
    assert not [n for n in families_page.WITHOUT_GGUF if families_page.gguf_architectures(n)]
