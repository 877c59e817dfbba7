"""Where a table's figures come from, in one line below it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from tools.performance.rows import Row

UNSHOWN_OPTIONS = ("--out", "--save", "--commit", "--work", "--note", "--ready-within", "--limit")
UNSHOWN_FLAGS = ("--no-check",)
UNSHOWN_VERSIONS = ("numpy", "python")
TABLE_OPTIONS = ("--order", "--shape", "--weight-format")
NO_COMMIT = "**no commit**"
MADE_AFTER_THE_RUN = frozenset(("5b9e9a7", "187bff6", "d24415f"))
"""Commits younger than rows that name them: what was measured became part of them.

Since 2026-11-24 a row names the commit that was checked out.
"""
ROOT = Path(__file__).resolve().parent.parent.parent
LANGUAGE_PATHS = tuple(
    f"modelmill/{name}" for name in ("models", "nn", "ops", "runtime", "weights")
)
_AGE = re.compile(r" \(age \w+\)")


def provenance_line(rows: Sequence[Row], commands: bool = True) -> str:
    """Device, versions, dates, commits and, with ``commands``, ages and commands of rows.

    Where rows name no commit the line says so: they carry no new claim; and so it does where the
    commit was made after they were measured. Of each script and part the newest row's command
    stands for all; every row has its own.
    """
    devices = _unique(str(row["device"]).partition(", ")[0] for row in rows)
    versions = _unique(
        f"{name} {version}"
        for row in rows
        for name, version in row.get("versions", {}).items()
        if name not in UNSHOWN_VERSIONS
    )
    dates = sorted({str(row["date"])[:10] for row in rows})
    commits = _unique(
        commit_and_age(row) if commands else _named_commit(row) + _made_after(row) for row in rows
    )
    by_script = {
        script_and_part(str(row["command"])): f"`{shown_command(str(row['command']))}`"
        for row in sorted(rows, key=lambda row: str(row["date"]))
    }
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    label = "" if NO_COMMIT in commits else "commit " if len(commits) == 1 else "commits "
    parts = [devices, versions, [when], [label + ", ".join(commits)]]
    parts += [list(by_script.values())] if commands else []
    return "; ".join(", ".join(part) for part in parts)


def commit_and_age(row: Row) -> str:
    """The commit, and how many later ones changed what the row times."""
    commit = _named_commit(row)
    if commit == NO_COMMIT:
        return commit
    return f"`{commit} (age {age(commit, timed_paths(row))})`{_made_after(row)}"


def _named_commit(row: Row) -> str:
    return str(row.get("commit") or NO_COMMIT)


def _made_after(row: Row) -> str:
    """What stands behind a commit that is younger than the row."""
    return " (made after the run)" if row.get("commit") in MADE_AFTER_THE_RUN else ""


def timed_paths(row: Row) -> tuple[str, ...]:
    """The folders whose code a row times."""
    if "op" in (row.get("bench"), row.get("figure")):
        return ("modelmill/ops",)
    vision = ("modelmill/vision",) if row.get("bench") in ("sam", "minigpt4") else ()
    return (*LANGUAGE_PATHS, *vision)


@cache
def age(commit: str, paths: tuple[str, ...]) -> str:
    """How many commits since then touched ``paths``; "unknown" where git does not know it."""
    command = ["git", "-C", str(ROOT), "rev-list", "--count", f"{commit}..HEAD", "--", *paths]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return output.stdout.strip()


def without_ages(text: str) -> str:
    """A page's text without the ages, which change with every commit."""
    return _AGE.sub("", text)


def script_and_part(command: str) -> str:
    """A command's script, a word that follows and is no option or file, and what a table is of.

    Orders of a trace are two parts, and so are shapes and weight formats of the suite: each has
    lines of its own.
    """
    words = shlex.split(command)
    count = 2 if words[0] == "python" else 1
    part = [word for word in words[count : count + 1] if word.isalpha()]
    chosen = [value for flag, value in pairwise(words) if flag in TABLE_OPTIONS]
    return " ".join(words[:count] + part + chosen)


def shown_command(command: str) -> str:
    """A row's command without what says where its output went."""
    words = shlex.split(command)
    shown = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in UNSHOWN_OPTIONS:
            skip = True
        elif word not in UNSHOWN_FLAGS:
            shown.append(word)
    return " ".join(shown)


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
