"""The reading list of a weight's way in docs/walks.md names what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.source_files import parse

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "walks.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## The way of a weight\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \| .+ \|$", SECTION, re.MULTILINE)


MAX_FILES = 32
"""Files that a reader opens to follow a weight."""


def _functions(path: Path) -> set[str]:
    """Names of a file's functions, and of its classes' methods with the class's name."""
    names = set()
    for node in parse(path).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef)
            }
    return names


def test_every_row_is_a_file_and_its_function() -> None:
    lines = [line for line in SECTION.splitlines() if line.startswith("| `")]
    assert len(ROWS) == len(lines) > 20, "a row that is not | `file` | `function` | text |"
    absent = [
        f"{file}: {function}"
        for file, function in ROWS
        if not (ROOT / "modelmill" / file).is_file()
        or function not in _functions(ROOT / "modelmill" / file)
    ]
    assert not absent
    assert len({file for file, _ in ROWS}) <= MAX_FILES
