"""The longest run of each chat format without a failure, which docs/chat-formats.md shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.chat_formats.run_checks import FormatRun
from tools.generated_page import ROOT
from tools.run_stamp import commit_and_date

FILE = Path("tools/chat_formats/passed_runs.json")


@dataclass(frozen=True)
class PassedRun:
    """Answers that passed.

    Attributes:
        answers: number of them, with the seeds from 0 on.
        commits: of modelmill; two where a run went on with another one.
        date: of its end, in UTC.
    """

    answers: int
    commits: str
    date: str


def load_passed(root: Path = ROOT) -> dict[str, PassedRun]:
    """Return the runs by format; none where there is no file."""
    if not (root / FILE).exists():
        return {}
    values = json.loads((root / FILE).read_text("utf-8"))
    return {name: PassedRun(**value) for name, value in values.items()}


def save_passed(runs: Iterable[FormatRun], root: Path = ROOT) -> None:
    """Put runs from seed 0 without a failure into the file, if they are as long as those there."""
    passed = load_passed(root)
    commit, date = commit_and_date(FILE)
    for run in runs:
        before = passed.get(run.name)
        is_shorter = before is not None and run.checked < before.answers
        if not (run.first_seed or run.failures or is_shorter):
            passed[run.name] = PassedRun(run.checked, commit, date)
    values = {name: asdict(run) for name, run in sorted(passed.items())}
    (root / FILE).parent.mkdir(parents=True, exist_ok=True)
    (root / FILE).write_text(json.dumps(values, indent=1) + "\n", "utf-8")


def passed_table(passed: Mapping[str, PassedRun]) -> str:
    """A line for each commit: formats that passed as many answers there."""
    by_run: dict[PassedRun, list[str]] = {}
    for name, run in passed.items():
        by_run.setdefault(run, []).append(f"`{name}`")
    ordered = sorted(by_run, key=lambda run: (run.date, run.commits, run.answers))
    lines = ["| answers of each | commit | date | formats |", "|---|---|---|---|"]
    lines += [
        f"| {run.answers:,} | {run.commits} | {run.date} | {', '.join(by_run[run])} |"
        for run in ordered
    ]
    return "\n".join(lines) + "\n"
