"""Runs that measured both sides: a ratio is of one run, a figure the median over cards or runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from tools.performance.rows import Row

H200 = "NVIDIA H200"


@dataclass(frozen=True)
class PairedRun:
    """Both sides of one work in one run.

    lower_is_better: for milliseconds and seconds; False for rates.
    """

    engine: Row
    peer: Row
    lower_is_better: bool = True

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer this run was."""
        ratio = float(self.peer["value"]) / float(self.engine["value"])
        return ratio if self.lower_is_better else 1 / ratio


@dataclass(frozen=True)
class Summary:
    """Several runs of one work: medians, and the run that is the least favourable to us."""

    runs: Sequence[PairedRun]

    @property
    def engine_value(self) -> float:
        """Median of our figures."""
        return median(float(run.engine["value"]) for run in self.runs)

    @property
    def peer_value(self) -> float:
        """Median of the peer's figures."""
        return median(float(run.peer["value"]) for run in self.runs)

    @property
    def ratio(self) -> float:
        """Median of the runs' own ratios."""
        return median(run.ratio for run in self.runs)

    @property
    def worst(self) -> PairedRun:
        """The run with the smallest ratio."""
        return min(self.runs, key=lambda run: run.ratio)

    @property
    def rows(self) -> list[Row]:
        """The rows of all runs."""
        return [row for run in self.runs for row in (run.engine, run.peer)]


def on_device(rows: Iterable[Row], device: str) -> list[Row]:
    """Rows of a device alone or of several of its kind ("NVIDIA H200 x4"), of no other."""
    return [row for row in rows if str(row.get("device")).partition(" x")[0] == device]


def can_carry_a_claim(row: Row) -> bool:
    """Whether a row names the commit that was measured, and its card or host: others are refused.

    Nor does one with local changes carry a claim: that code cannot be measured again.
    """
    commit = str(row.get("commit") or "")
    on_gpu = str(row.get("device")).startswith("NVIDIA")
    machine = row.get("device_id") if on_gpu else row.get("host_cpu")
    return bool(commit) and not commit.endswith("-dirty") and bool(machine)


def paired_runs(
    rows: Iterable[Row], subject: str, peer: str, lower_is_better: bool = True
) -> list[PairedRun]:
    """Both sides' rows of the same run, in order of date.

    rows: of one work; subject: our side. A run has a name; where rows have none, its command and
    its date.
    """
    return [pair for (pair,) in runs_with_peers(rows, subject, (peer,), lower_is_better)]


def runs_with_peers(
    rows: Iterable[Row], subject: str, peers: Sequence[str], lower_is_better: bool = True
) -> list[list[PairedRun]]:
    """Of each run with our side and a peer or more, our side beside each of them; by date."""
    by_run: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: str(row["date"])):
        run = (row["run"],) if "run" in row else (row["command"], row["date"])
        by_run.setdefault(run, {})[row["subject"]] = row
    pairs = [
        [
            PairedRun(sides[subject], sides[peer], lower_is_better)
            for peer in peers
            if {subject, peer} <= sides.keys()
        ]
        for sides in by_run.values()
    ]
    return [run for run in pairs if run]


def newest_per_card(
    runs: Iterable[PairedRun], card: Callable[[Row], object] = lambda row: row["device_id"]
) -> list[PairedRun]:
    """Of each card its newest run."""
    return list({card(run.engine): run for run in runs}.values())
