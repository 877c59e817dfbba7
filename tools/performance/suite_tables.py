"""``make bench`` on every device with rows: the engine, peers of the same runs, the floor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from tools.performance.numbers import count_range, number, ratio_number
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
    """Lines by (device, shape and weight format), from the rows that carry a claim."""
    runs: dict[tuple[str, str], dict[str, dict[str, dict[str, Row]]]] = {}
    for row in sorted(rows, key=lambda row: str(row.get("date"))):
        if row.get("bench") == "suite" and can_carry_a_claim(row):
            name = ", ".join(filter(None, (row["shape"], row.get("weights"))))
            group = runs.setdefault((str(row["device"]), name), {})
            group.setdefault(row["work"], {}).setdefault(row["run"], {})[row["subject"]] = row
    return {
        key: [SuiteLine(work, newest_of_each_card(by_run)) for work, by_run in works.items()]
        for key, works in runs.items()
    }


def newest_of_each_card(by_run: Mapping[str, Sides]) -> list[Sides]:
    """The last run of each card; without a card, every run of the newest commit and processor.

    Processors of one name may have other instructions, and are other machines then.
    """
    newest = next(iter(list(by_run.values())[-1].values()))
    chosen: dict[str, Sides] = {}
    for run, sides in by_run.items():
        row = next(iter(sides.values()))
        card = row.get("device_id")
        if card or all(row.get(key) == newest.get(key) for key in ("commit", "host_simd")):
            chosen[str(card or run)] = sides
    return list(chosen.values())


def suite_table(rows: Sequence[Row]) -> list[str]:
    """A table for each device and each set of sides; a shape is named in front of its works."""
    tables: dict[tuple[str, tuple[str, ...]], list[tuple[str, SuiteLine]]] = {}
    for (device, shape), lines in suite_lines(rows).items():
        sides = (name for line in lines for sides in line.runs for name in sides)
        named = [(shape if i == 0 else "", line) for i, line in enumerate(lines)]
        tables.setdefault((device, tuple(dict.fromkeys(sides))), []).extend(named)
    parts: list[str] = []
    for (device, subjects), named in tables.items():
        several = any(len(line.runs) > 1 for _, line in named)
        heads = ["ms", "", "floor", *subjects, "best peer ÷ ours"]
        heads += ["least", "cards"] if several else []
        used = [row for _, line in named for sides in line.runs for row in sides.values()]
        parts += [
            f"**{device}**{_instructions(used[-1])}",
            "",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
        ]
        parts += [
            f"| {' | '.join([shape, *_cells(line, subjects, several)])} |" for shape, line in named
        ]
        parts += ["", provenance_line(used), ""]
    return parts[:-1]


def _instructions(row: Row) -> str:
    """A processor's SIMD instructions, where no card computed; old rows do not name them."""
    simd = None if row.get("device_id") else row.get("host_simd")
    return f" ({', '.join(simd)})" if simd else ""


def suite_summary(rows: Sequence[Row]) -> list[str]:
    """A line for each device and shape: means of decode's and first tokens' ratios, the least."""
    parts = [
        "| device, shape | peer | decode | first token | least | works of each | cards or runs |",
        "|---|---|---|---|---|---|---|",
    ]
    for (device, shape), lines in suite_lines(rows).items():
        compared = [line for line in lines if line.ratios]
        if not compared:
            continue
        means = [_ratio_cell(mean_ratio(compared, start)) for start in ("decode", "first")]
        works = [
            str(sum(line.work.startswith(start) for line in compared))
            for start in ("decode", "first")
        ]
        least = min(compared, key=lambda line: min(line.ratios))
        peers = {name.split()[0] for line in compared for each in line.runs for name in each}
        peers = {name for name in peers if not is_ours(name)}
        cards = count_range([len(line.runs) for line in compared])
        parts.append(
            f"| {device}, {shape} | {' or '.join(sorted(peers))} | {means[0]} "
            f"| {means[1]} | {ratio_number(min(least.ratios))} ({least.work}) "
            f"| {' + '.join(works)} | {cards} |"
        )
    return parts


def mean_ratio(lines: Sequence[SuiteLine], start: str) -> float | None:
    """Of the compared works whose names start so; each with the median over its runs."""
    ratios = [median(line.ratios) for line in lines if line.ratios and line.work.startswith(start)]
    return geometric_mean(ratios) if ratios else None


def _ratio_cell(ratio: float | None) -> str:
    return "–" if ratio is None else f"**{ratio_number(ratio)}**"


def _cells(line: SuiteLine, subjects: Sequence[str], several: bool) -> list[str]:
    fastest = min((v for s in subjects if is_ours(s) and (v := line.value(s))), default=None)
    values = []
    for subject in subjects:
        value = line.value(subject)
        text = "–" if value is None else number(value)
        values.append(f"**{text}**" if value is not None and value == fastest else text)
    ratios = line.ratios
    compared = [ratio_number(median(ratios)) if ratios else "–"]
    if several:
        compared += [ratio_number(min(ratios)) if ratios else "–", str(len(line.runs))]
    return [line.work, number(line.floor), *values, *compared]
