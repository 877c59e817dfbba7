"""What an item found, and how long that stays true."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SOURCES = ("*.py", "*.cpp", "*.h", "*.txt")


@dataclass(frozen=True)
class Fact:
    """One line of the report: the claim, the measurement, and whether it passed.

    ok None: for information, without a claim.
    """

    promised: str
    measured: str
    passed: bool | None = True


@dataclass
class VerifyResult:
    """An item's outcome.

    Attributes:
        notes: lengths, settings and caveats a reader needs to repeat it.
        is_of_older_code: whether the sources changed since, and the item was not run again.
    """

    ok: bool
    rows: list[Fact]
    command: str = ""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    date: str = ""
    digest: str = ""
    commit: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    is_of_older_code: bool = False


def make_result(rows: Sequence[Fact], notes: Sequence[str] = ()) -> VerifyResult:
    """A result; ok if no fact is False and at least one is True."""
    judged = [row.passed for row in rows if row.passed is not None]
    return VerifyResult(bool(judged) and all(judged), list(rows), notes=list(notes))


def source_digest(package: Path, *extra: Path) -> str:
    """sha256 over the sources that a result depends on, names and contents."""
    total = hashlib.sha256()
    files = {
        path
        for pattern in SOURCES
        for path in package.rglob(pattern)
        if "__pycache__" not in path.parts
    }
    for path in (*sorted(files), *extra):
        total.update(str(path.name if path in extra else path.relative_to(package)).encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def store(result: VerifyResult, path: Path) -> None:
    """Write a result as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(result), indent=1) + "\n")
    draft.replace(path)


def load(path: Path, current: str | None = None) -> VerifyResult | None:
    """Return the stored result; None if absent, unreadable, or not of digest ``current``."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        raw["rows"] = [Fact(**row) for row in raw["rows"]]
        result = VerifyResult(**raw)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if current is None or result.digest == current else None


def of_older_code(result: VerifyResult | None) -> VerifyResult | None:
    """The result, marked as measured before the sources changed."""
    return None if result is None else replace(result, is_of_older_code=True)
