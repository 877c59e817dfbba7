"""The list of tests that only ``make test-all`` runs names tests that exist, and leaves no gap."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.full_only import EXHAUSTIVE_ONLY, FULL_ONLY, is_full_only, pattern_expression

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def names() -> dict[str, list[str]]:
    """Names of the collected tests by file, of the files in the list."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    command.append("--exhaustive")
    done = subprocess.run(
        [*command, *FULL_ONLY], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names_by_file: dict[str, list[str]] = defaultdict(list)
    for line in done.stdout.splitlines():
        path, separator, name = line.partition("::")
        if separator and path in FULL_ONLY:
            names_by_file[path].append(name)
    assert names_by_file.keys() == FULL_ONLY.keys(), done.stdout[-2000:]
    return names_by_file


def test_every_pattern_matches_a_test(names: dict[str, list[str]]) -> None:
    unused = [
        (path, pattern)
        for path, patterns in (*FULL_ONLY.items(), *EXHAUSTIVE_ONLY.items())
        for pattern in patterns
        if not any(pattern_expression(pattern).fullmatch(name) for name in names[path])
    ]
    assert not unused


def test_a_test_that_is_left_out_in_part_keeps_a_case(names: dict[str, list[str]]) -> None:
    for path, collected in names.items():
        remaining = {
            name.partition("[")[0] for name in collected if not is_full_only(f"{path}::{name}")
        }
        for pattern in FULL_ONLY[path]:
            test, bracket, _ = pattern.partition("[")
            if bracket and "*" not in test:
                assert test in remaining, f"{path}: no case of {test} is left"


def test_every_op_and_backend_keeps_a_case(names: dict[str, list[str]]) -> None:
    path = "tests/ops/test_implementations.py"
    labels = [name for name in names[path] if "-cpu-" in name]
    operands = {label.rpartition("-")[0] for label in labels}
    remaining = {
        label.rpartition("-")[0] for label in labels if not is_full_only(f"{path}::{label}")
    }
    assert remaining == operands


def test_make_test_families_runs_all_that_make_test_all_leaves_to_it() -> None:
    (paths,) = re.findall(r"--exhaustive (.*)", (ROOT / "Makefile").read_text())
    globs = re.sub(r"\$\(wildcard (.*?)\)", r"\1", paths).split()
    files = {str(path.relative_to(ROOT)) for glob in globs for path in ROOT.glob(glob)}
    assert files >= EXHAUSTIVE_ONLY.keys()


PATTERNS = {
    "test_a[1-*": ("test_a[1-x]", "test_a[2-x]"),
    "test_a[case[12]]": ("test_a[case2]", "test_a[case0]"),
    "test_a[kind[1-8]]": ("test_a[kind7]", "test_a[kind9]"),
    "test_a[{}]": ("test_a[{}]", "test_a[]"),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str) -> None:
    """Of each pattern the first name matches and the second does not."""
    matches, (name, other) = pattern_expression(pattern).fullmatch, PATTERNS[pattern]
    assert matches(name)
    assert not matches(other)
    assert pattern_expression("*").fullmatch(name)
