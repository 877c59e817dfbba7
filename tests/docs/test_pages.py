"""Pages of docs/ stay short, and their prose is not a table in disguise.

A page has at most ``MAX_BYTES``. A paragraph of prose has at most ``MAX_FIGURES`` figures: what
has more belongs into a table. How they are counted:

* A paragraph is a block of lines between empty lines, or one item of a list with the lines that
  continue it. Tables, fenced and indented code, headings and HTML comments are no prose.
* Code spans, the targets of links, and images are left out before anything is counted.
* A figure is a word that is a number, with or without a sign, a unit or a per cent sign; "1.2–3.4"
  and "8×128" are two. No figures: names (int8, W8A8, H200, GPT-2, 8-bit), a number of bits, dates
  and times, versions (three parts, or behind a word of ``VERSIONED``), ordinals, hashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
MAX_BYTES = 15 * 1024
MAX_FIGURES = 6
SMALLER = {"performance.md": 8 * 1024}
"""Pages with a limit of their own, in bytes."""
VERSIONED = frozenset(
    "python torch vllm cuda triton transformers zen rfc node chromium version llama.cpp".split()  # noqa: SIM905
)
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_NO_TEXT = re.compile(r"!\[[^\]]*\]\([^)]*\)|`[^`]*`|<https?:[^>]*>|https?:\S+")
_TARGET = re.compile(r"\]\([^)]*\)")
_ITEM = re.compile(r"^ *(?:[*+-]|\d+\.) ")
_NUMBER = r"[~≈≤≥<>±+−-]?\d[\d,]*(?:\.\d+)?"
_UNIT = r"(?:%|×|x|°|[µmkKMGT]?s|[KMGT]i?B|ms|[KMG]?W|FLOPs?)?"
_FIGURE = re.compile(rf"{_NUMBER}{_UNIT}")
_DATE = re.compile(
    r"\d{4}-\d\d(?:-\d\d)?|\d{1,2}:\d\d(?::\d\d)?|\d+\.\d+\.\d+\S*|\d+(?:st|nd|rd|th)"
)
_SPLIT = re.compile(r"\s+|(?<=\d)(?:–|…|×|/)(?=\d)")
_PUNCTUATION = "()[]{}.,;:!?\"'*_“”"


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of prose of a page in Markdown."""
    text = _COMMENT.sub("", _FENCE.sub("\n", text))
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        starts_item = bool(_ITEM.match(line))
        is_prose = bool(line.strip()) and not line.lstrip().startswith(("|", "#"))
        if block and (starts_item or not is_prose):
            yield " ".join(block)
            block = []
        is_code = line.startswith("    ") and not block and not starts_item
        if is_prose and not is_code:
            block.append(_ITEM.sub("", line).strip())


def figures(paragraph: str) -> list[str]:
    """The words of a paragraph that are figures."""
    words = _SPLIT.split(_TARGET.sub("]", _NO_TEXT.sub(" ", paragraph)))
    words = [word.strip(_PUNCTUATION) for word in words]
    following = [*words[1:], ""]
    counted = []
    for before, word, after in zip(["", *words], words, following, strict=False):
        names_a_format = after.startswith("bit") or before.lower() in VERSIONED
        if _FIGURE.fullmatch(word) and not _DATE.fullmatch(word) and not names_a_format:
            counted.append(word)
    return counted


def faults(page: str, text: str) -> list[str]:
    """What a page breaks of the rules, each in a line."""
    size, limit = len(text.encode()), SMALLER.get(page, MAX_BYTES)
    too_large = [f"{size:,} bytes, at most {limit:,}"] if size > limit else []
    return too_large + [
        f"{len(counted)} figures in {paragraph[:60]!r}…: a table would show them"
        for paragraph in paragraphs(text)
        if len(counted := figures(paragraph)) > MAX_FIGURES
    ]


PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_its_prose_is_no_table(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    broken = faults(page, text)
    assert not broken, f"{page}: " + "; ".join(broken)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It takes 3.6 ms, 4.67 in turn: 1.30×, +2 %, and 1,024 tokens.", 5),
        ("From 1.2–3.4 s at 64×1,024, 83.0 … 84.8, (12).", 7),
        ("int8 W8A8 g128 H200 GPT-2 float32 SmolLM2 8-bit, 8 bits, 4 bit.", 0),
        ("On 2026-11-23, 15:36, vLLM 0.25.1, Python 3.11, 2.11.0 at 249fa6f, the 2nd.", 0),
        ("`--prefill 1x4096` [see](notes/a-12-b.md#3) ![5](6.svg) https://x.y/7", 0),
    ],
)
def test_figures_are_counted_as_the_docstring_says(text: str, count: int) -> None:
    assert len(figures(text)) == count, figures(text)


def cell_count(line: str) -> int:
    """Cells of a table's line, where a bar within a code span ends a cell, too."""
    return line.strip().replace("\\|", "").strip("|").count("|") + 1


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_table_has_more_cells_than_its_head(page: str) -> None:
    text = _FENCE.sub("", (DOCS / page).read_text(encoding="utf-8"))
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = block.splitlines()
        wrong = [line for line in lines if cell_count(line) > cell_count(lines[0])]
        assert not wrong, f"{page}: {wrong[0]}"


def test_a_bar_in_a_code_span_ends_a_cell() -> None:
    assert [cell_count(line) for line in ("| a | `b` |", "| a | `b|c` |", r"| a | `b\|c` |")] == [
        2, 3, 2,
    ]  # fmt: skip


def test_paragraphs_are_prose_only() -> None:
    text = (
        "<!-- 1\n2 -->\n# Title 3\n\nOne\ntwo.\n| 4 | 5 |\n\n* item\n  goes on\n* next\n\n"
        "1. first\n2. second\n\n```\n6\n```\n\n    code 7\n\nLast.\n"
    )
    assert list(paragraphs(text)) == [
        "One two.", "item goes on", "next", "first", "second", "Last.",
    ]  # fmt: skip


def test_both_faults_are_found() -> None:
    assert faults("a.md", "word " * 5000)[0].startswith("25,000 bytes")
    assert faults("performance.md", "word " * 2000)[0].startswith("10,000 bytes")
    assert faults("a.md", "1 2 3 4 5 6 7")[0].startswith("7 figures")
    assert not faults("a.md", "1 2 3 4 5 6\n\n| 1 2 3 4 5 6 7 |\n")
