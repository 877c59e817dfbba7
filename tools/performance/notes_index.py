"""docs/notes/README.md: the table of all notes, from the head of each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("docs/notes")
PAGE = FOLDER / "README.md"
AREAS = (
    "decode", "prompts", "scheduling", "attention", "weights of 8 and 4 bits", "accuracy",
    "several GPUs", "serving", "vision", "CPU", "building",
)  # fmt: skip
RESULTS = ("helped", "did not help", "mended", "open")
SECTIONS = ("Hypothesis", "Change", "Before", "After", "Decision")
HEAD = f"""<!-- Made by `make performance` from the notes beside it: change those. -->

# Notes: what was tried

One idea a file, as it stood when it was measured: {", ".join(SECTIONS[:-1])} and {SECTIONS[-1]}.
*Rows* names the rows in [benchmarks/results](../../benchmarks/results) that show a note's figures.
Where it says "no row kept", the figures were written down at the time and nothing in the repository
shows them: no claim is built on them. Pairs are of one run unless a note says otherwise. The pairs
with rows as a plot: [before and after](../img/performance-ideas.svg). Today's speeds:
[performance](../performance.md).
"""
_TITLE = re.compile(r"\A# (?P<title>.+)\n\n\*(?P<area>[^·\n]+) · (?P<result>[^·\n]+)\*\n")


class NoteHead(NamedTuple):
    """What a note says of itself in its first lines."""

    file: str
    title: str
    area: str
    result: str


def read_head(file: str, text: str) -> NoteHead:
    """The head of a note. Raises ValueError naming a file that has none, or an unknown word."""
    match = _TITLE.match(text)
    if match is None:
        raise ValueError(f"{FOLDER / file}: no title with *area · result* below it")
    head = NoteHead(file, match["title"], match["area"], match["result"])
    for word, known in ((head.area, AREAS), (head.result, RESULTS)):
        if word not in known:
            raise ValueError(f"{FOLDER / file}: {word!r} is not one of {', '.join(known)}")
    return head


def note_files(root: Path) -> list[Path]:
    """The notes in order of name, without the index."""
    return sorted(path for path in (root / FOLDER).glob("*.md") if path.name != PAGE.name)


def render(root: Path) -> str:
    """The index: a line a note, by area, what helped first."""
    heads = [read_head(path.name, path.read_text(encoding="utf-8")) for path in note_files(root)]
    return "\n".join((HEAD, *_table(heads))) + "\n"


def _table(heads: Iterable[NoteHead]) -> list[str]:
    lines = ["| idea | area | |", "|---|---|---|"]
    ordered = sorted(
        heads, key=lambda head: (AREAS.index(head.area), RESULTS.index(head.result), head.file)
    )
    lines += [f"| [{head.title}]({head.file}) | {head.area} | {head.result} |" for head in ordered]
    return lines
