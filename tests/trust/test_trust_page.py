"""docs/trust.md and docs/trust-faults.md name tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIST = "".join((ROOT / "docs" / name).read_text() for name in ("trust.md", "trust-faults.md"))
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", LIST)))


@cache
def names_in(file: str) -> frozenset[str]:
    """The test functions at a file's top."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part.rsplit("/", 1)[-1])
def test_it_exists(file: str, name: str) -> None:
    assert name.startswith("test_")
    assert name in names_in(file), f"{file} has no {name}"


def test_every_row_has_a_test() -> None:
    rows = [
        line
        for line in LIST.partition("## Soak tests")[0].splitlines()
        if line.startswith("| ") and not line.startswith("| what")
    ]
    assert len(rows) >= 40
    for row in rows:
        assert row.count("|") == 4, row
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", row), row
