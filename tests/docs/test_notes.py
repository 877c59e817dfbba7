"""docs/notes: each file is one idea with its parts, and the index lists it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.performance import notes_index

ROOT = Path(__file__).resolve().parent.parent.parent
NOTES = notes_index.note_files(ROOT)
MAX_NOTE_BYTES = 4096
NAMES_ROWS = re.compile(r"\*\*Rows\.\*\* (.+)\Z", re.DOTALL)
SHOWN_BY = re.compile(r"`[^`]+`|\bNo row kept\b|\bRows with\b|\bcounts\b")
WITHDRAWN = (re.compile(r"\b5\.5\b.{0,40}\b25\.3\b"), re.compile(r"\b19\.6\b.{0,40}\b27\.4\b"))
"""Comparisons with a capped peer, and with one run of ten."""


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.name)
def test_a_note_is_short_and_has_its_parts(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert notes_index.read_head(path.name, text).file == path.name
    assert len(text.encode()) <= MAX_NOTE_BYTES
    missing = [name for name in notes_index.SECTIONS if name not in text]
    assert not missing, f"{path.name} has no {', '.join(missing)}"
    rows = NAMES_ROWS.search(text)
    assert rows, f"{path.name} does not end with its rows"
    assert SHOWN_BY.search(rows[1]), f"{path.name} names no rows and does not say: No row kept"


def test_the_index_lists_every_note() -> None:
    index = (ROOT / notes_index.PAGE).read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[.+\]\(([^)]+)\) \|", index, re.MULTILINE)
    assert sorted(listed) == [path.name for path in NOTES]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# A\n\nText\n", "no title with"),
        ("# A\n\n*poetry · helped*\n", "'poetry' is not one of decode"),
        ("# A\n\n*decode · maybe*\n", "'maybe' is not one of helped"),
    ],
)
def test_a_note_without_a_head_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"docs/notes/a.md: .*{message}"):
        notes_index.read_head("a.md", text)


def test_withdrawn_comparisons_stand_nowhere() -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        text = path.read_text(encoding="utf-8").replace("\n", " ")
        for pattern in WITHDRAWN:
            assert not pattern.search(text), f"{path.relative_to(ROOT)}: {pattern.pattern}"
