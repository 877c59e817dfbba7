"""Take up a run of ``make bench`` that was interrupted, from the rows that it has written."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figure_statistics import MeasuredFigure

MAX_AGE = timedelta(hours=12)
"""Of the last row of a run that is taken up: another day the machine is not the same."""
SAME = ("commit", "device", "host_cpu", "host_simd", "host_cores", "device_id", "driver")
"""Keys of rows that must be equal, and the command but for its minutes."""
DATE_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


class MeasuredLine(NamedTuple):
    """One line of the table: milliseconds of the floor and of each side."""

    shape: str
    work: str
    floor: float
    figures: Mapping[str, MeasuredFigure]


class UnfinishedRun(NamedTuple):
    """A run's name, and the lines that it has measured."""

    run: str
    lines: Sequence[MeasuredLine]


def find_unfinished_run(
    out: Path, identity: Mapping[str, Any], planned: Sequence[tuple[str, str]], now: datetime
) -> UnfinishedRun | None:
    """Return the last run in a file of rows, if it is of this machine and code and lacks works.

    Args:
        out: file of rows; may be absent.
        identity: what rows of this run carry; the keys of SAME are compared.
        planned: (shape, work) that this run measures.
        now: the time.

    Returns:
        None also if the code differs from its commit: then no row says what it measured.
    """
    commit = str(identity.get("commit") or "-dirty")
    if commit.endswith("-dirty") or not out.exists():
        return None
    rows = [row for row in _whole_rows(out) if row.get("bench") == "suite"]
    if not rows or any(rows[-1].get(key) != identity.get(key) for key in SAME):
        return None
    if _without_minutes(rows[-1]["command"]) != _without_minutes(identity["command"]):
        return None
    age = now - datetime.strptime(rows[-1]["date"], DATE_FORMAT).replace(tzinfo=UTC)
    if age > MAX_AGE:
        return None
    run = rows[-1]["run"]
    lines = _lines([row for row in rows if row["run"] == run])
    measured = {(line.shape, line.work) for line in lines}
    return None if measured.issuperset(planned) else UnfinishedRun(run, lines)


def _whole_rows(out: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, but for one that was half written when the machine stopped."""
    for line in out.read_text("utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def _without_minutes(command: str) -> str:
    return re.sub(r" --minutes[ =]\S+", "", command)


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[MeasuredLine]:
    """The lines of a run's rows, in their order."""
    lines = []
    for shape, work in dict.fromkeys((row["shape"], row["work"]) for row in rows):
        of_line = [row for row in rows if (row["shape"], row["work"]) == (shape, work)]
        figures = {
            row["subject"]: MeasuredFigure(**row["spread"], calls=row["calls_s"]) for row in of_line
        }
        lines.append(MeasuredLine(shape, work, of_line[0]["floor"], figures))
    return lines
