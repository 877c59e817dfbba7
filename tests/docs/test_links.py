"""Links between the files of the repository: what they name is there, headings too.

The site's build checks docs/; these tests check README and the other pages at the root as well.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.test_pages import DOCS, ROOT

FILES = sorted([*ROOT.glob("*.md"), *(ROOT / "deploy").rglob("*.md"), *DOCS.rglob("*.md")])
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)(?: \"[^\"]*\")?\)")


def links(text: str) -> list[str]:
    """Targets within the repository; those in code are none."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text)))


@cache
def anchors(path: Path) -> frozenset[str]:
    """Names of a page's headings, as GitHub and the site make them, and its own ids."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    names: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.append(f"{name}-{names.count(name)}" if name in names else name)
    return frozenset(names) | frozenset(re.findall(r'id="([^"]+)"', text))


def dead_links(path: Path) -> list[str]:
    """Links of a file whose target is not there."""
    dead = []
    for link in links(path.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        is_there = target.exists()
        if is_there and anchor and target.suffix == ".md":
            is_there = anchor in anchors(target)
        if not is_there:
            dead.append(link)
    return dead


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(path: Path) -> None:
    assert dead_links(path) == []


def test_dead_links_are_found(tmp_path: Path) -> None:
    other, page = tmp_path / "other.md", tmp_path / "page.md"
    other.write_text("# A `b` [c](d)\n\n## Twice\n\n## Twice\n")
    page.write_text(
        "[1](other.md#a-b-c) [2](other.md#twice-1) [3](gone.md) [4](other.md#gone) [5](#gone)\n"
        "`[6](gone.md)` [7](https://a.b/gone.md) [8](other.md)\n\n```\n[9](gone.md)\n```\n"
    )
    assert dead_links(page) == ["gone.md", "other.md#gone", "#gone"]
