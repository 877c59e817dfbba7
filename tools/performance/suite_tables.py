"""``make bench`` on every device with rows: the engine, peers of the same runs, the floor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tools.performance.numbers import number
from tools.performance.provenance import provenance_line
from tools.performance.rows import OURS, Row
from tools.performance.runs import can_carry_a_claim

Sides = Mapping[str, Row]


@dataclass(frozen=True)
class SuiteLine:
    """A work on a device: the newest run of each card, or every run where rows name no card."""

    work: str
    runs: Sequence[Sides]

    def value(self, subject: str) -> float | None:
        """Median of a side's milliseconds over the runs that have it."""
        values = [float(sides[subject]["value"]) for sides in self.runs if subject in sides]
        return median(values) if values else None

    @property
    def floor(self) -> float:
        """Median of the floors, each measured in its run."""
        return median(float(next(iter(sides.values()))["floor"]) for sides in self.runs)

    @property
    def ratios(self) -> list[float]:
        """Of each run that has a peer: its fastest peer's time over our fastest side's."""
        ratios = []
        for sides in self.runs:
            engines, peers = (
                [float(row["value"]) for name, row in sides.items() if is_ours(name) == own]
                for own in (True, False)
            )
            if engines and peers:
                ratios.append(min(peers) / min(engines))
        return ratios


def is_ours(subject: str) -> bool:
    """Whether a side is modelmill, in whatever recipe."""
    return subject.startswith(OURS)


def suite_lines(rows: Iterable[Row]) -> dict[tuple[str, str], list[SuiteLine]]:
    """Lines by (device, shape), from the rows that carry a claim."""
    runs: dict[tuple[str, str], dict[str, dict[str, dict[str, Row]]]] = {}
    for row in sorted(rows, key=lambda row: str(row.get("date"))):
        if row.get("bench") == "suite" and can_carry_a_claim(row):
            group = runs.setdefault((str(row["device"]), row["shape"]), {})
            group.setdefault(row["work"], {}).setdefault(row["run"], {})[row["subject"]] = row
    return {
        key: [SuiteLine(work, newest_of_each_card(by_run)) for work, by_run in works.items()]
        for key, works in runs.items()
    }


def newest_of_each_card(by_run: Mapping[str, Sides]) -> list[Sides]:
    """The last run of each card; a run without a card's id counts by itself."""
    chosen: dict[str, Sides] = {}
    for run, sides in by_run.items():
        chosen[str(next(iter(sides.values())).get("device_id") or run)] = sides
    return list(chosen.values())


def suite_table(rows: Sequence[Row]) -> list[str]:
    """A table for each device and shape."""
    parts: list[str] = []
    for (device, shape), lines in suite_lines(rows).items():
        subjects = list(
            dict.fromkeys(name for line in lines for sides in line.runs for name in sides)
        )
        heads = ["ms", "floor", *subjects, "best peer ÷ ours", "least", "runs"]
        parts += [
            f"**{shape}, {device}**",
            "",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
        ]
        parts += [f"| {' | '.join(_cells(line, subjects))} |" for line in lines]
        used = [row for line in lines for sides in line.runs for row in sides.values()]
        parts += ["", provenance_line(used), ""]
    return parts[:-1]


def _cells(line: SuiteLine, subjects: Sequence[str]) -> list[str]:
    fastest = min((v for s in subjects if is_ours(s) and (v := line.value(s))), default=None)
    values = []
    for subject in subjects:
        value = line.value(subject)
        text = "–" if value is None else number(value)
        values.append(f"**{text}**" if value is not None and value == fastest else text)
    ratios = line.ratios
    compared = [f"**{median(ratios):.2f}**", f"{min(ratios):.2f}"] if ratios else ["–", "–"]
    return [line.work, number(line.floor), *values, *compared, str(len(line.runs))]
