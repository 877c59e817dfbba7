"""What a suite is, and what it found.

A suite is a module of this folder that has

* ``TITLE``: one line, what it shows;
* ``PACKAGE``: whose version the report gives (a Python distribution; a suite of another type sets
  ``Result.version``);
* ``run(base_url, model, out) -> Result``: base_url ends in ``/v1``, model is a served name, out is
  a folder of the suite's own for logs. It raises for what keeps it from running; a failed check is
  an entry of the result.

A module without ``run`` is no suite. Packages of the extra ``conformance`` are imported inside
``run``. Results are kept while the sources of modelmill, the suite's file and the package's version
stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FailedCheck:
    """One check that did not pass.

    reason: what a failure showed; why a check was excluded.
    """

    name: str
    reason: str


@dataclass
class SuiteResult:
    """Result of a suite.

    passed: number of checks. failed, excluded: the others by name. notes: what a reader needs to
    repeat it.

    facts: numbers that were measured, in the reader's words. The rest is filled in by ``__main__``;
    commit: of modelmill; stale: of older sources.
    """

    passed: int
    failed: list[FailedCheck] = field(default_factory=list)
    excluded: list[FailedCheck] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    version: str = ""
    title: str = ""
    package: str = ""
    seconds: float = 0.0
    date: str = ""
    digest: str = ""
    commit: str = ""
    stale: bool = False

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing failed."""
        return self.passed > 0 and not self.failed


def make_result(
    cases: Sequence[tuple[str, str | None]],
    excluded: Sequence[FailedCheck] = (),
    notes: Sequence[str] = (),
) -> SuiteResult:
    """A result of (name, what went wrong or None)."""
    failed = [FailedCheck(name, problem) for name, problem in cases if problem is not None]
    return SuiteResult(len(cases) - len(failed), failed, list(excluded), notes=list(notes))


def store(result: SuiteResult, path: Path) -> None:
    """Write a result as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(
        json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    draft.replace(path)


def load(path: Path, current: str | None = None) -> SuiteResult | None:
    """Return the stored result; None if absent, unreadable, or not of digest ``current``."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text("utf-8"))
        raw["failed"] = [FailedCheck(**each) for each in raw["failed"]]
        raw["excluded"] = [FailedCheck(**each) for each in raw["excluded"]]
        result = SuiteResult(**raw)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if current is None or result.digest == current else None
