"""Commits that a page names for its figures are in this repository's history, and which of them
are younger than their rows is said.
"""

from __future__ import annotations

import re
import subprocess
from datetime import datetime
from functools import cache

import pytest

from tests.docs.test_pages import DOCS, PAGES, ROOT
from tools.performance.provenance import MADE_AFTER_THE_RUN
from tools.performance.rows import read_rows

NAMED = re.compile(
    r"\bcommits? ((?:`?[0-9a-f]{7,12}(?: \(age \w+\))?`?(?: \(made after the run\))?(?:, )?)+)"
)


def named_commits(text: str) -> set[str]:
    """Commits behind the word, without their ages."""
    return {
        commit
        for match in NAMED.finditer(text)
        for commit in re.findall(r"\b[0-9a-f]{7,12}\b", re.sub(r"\(age \w+\)", "", match[1]))
    }


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)


def test_commits_are_read_behind_the_word() -> None:
    text = (
        "commits `249fa6f (age 329)` (made after the run), `d24415f (age unknown)`, `python`; "
        "commit 0123456789ab"
    )
    assert named_commits(text) == {"249fa6f", "d24415f", "0123456789ab"}
    assert not named_commits("the commit of 2026-11-23; commit message; decommit 249fa6f")


@pytest.fixture
def whole_history() -> None:
    if (
        not (ROOT / ".git").exists()
        or _git("rev-parse", "--is-shallow-repository").stdout != "false\n"
    ):
        pytest.skip("needs the whole history: this is no clone, or a shallow one")


@pytest.mark.usefixtures("whole_history")
def test_every_commit_is_in_the_history() -> None:
    by_page = {page: named_commits((DOCS / page).read_text(encoding="utf-8")) for page in PAGES}
    assert any(by_page.values())
    named = {commit for commits in by_page.values() for commit in commits}
    unknown = {c for c in named if _git("merge-base", "--is-ancestor", c, "HEAD").returncode}
    assert not unknown, {page: commits & unknown for page, commits in by_page.items()}


@cache
def _committed(commit: str) -> datetime | None:
    shown = _git("show", "-s", "--format=%cI", commit).stdout.strip()
    return datetime.fromisoformat(shown) if shown else None


@pytest.mark.usefixtures("whole_history")
def test_pages_know_the_commits_that_are_younger_than_their_rows() -> None:
    younger = set()
    for file in sorted((ROOT / "benchmarks/results").glob("*.jsonl")):
        for row in read_rows(file):
            commit = str(row.get("commit") or "")
            committed = _committed(commit) if commit else None
            if committed and datetime.fromisoformat(row["date"]) < committed:
                younger.add(commit)
    assert younger == MADE_AFTER_THE_RUN
