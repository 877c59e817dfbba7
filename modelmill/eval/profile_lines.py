"""The lines of a profile, and the tracks of its trace: what kernels and ops took, beside their floors."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelmill.eval import chrome
from modelmill.eval.ceilings import Ceilings
from modelmill.eval.counts import Count
from modelmill.eval.kernels import Kernel
from modelmill.eval.watch import Slice, grouped

CallKey = tuple[str, str, int]  # module, op, number of the call


@dataclass(frozen=True)
class Line:
    """A kernel of an op of a module, all layers together. us: microseconds of a step.

    nbytes, operations, floor_us, fraction: of the op with all its kernels, on the line of the longest; None on its
    others and where nothing is counted.
    """

    module: str
    op: str
    kernel: str
    calls: int
    us: float
    share: float
    nbytes: int | None = None
    operations: int | None = None
    floor_us: float | None = None
    fraction: float | None = None


def counts_of(calls: Sequence[Slice]) -> dict[CallKey, Count]:
    """The count of every call; calls of one op by one module are numbered in order."""
    numbers: dict[tuple[str, str], int] = defaultdict(int)
    found: dict[CallKey, Count] = {}
    for each in calls:
        name = (each.module, each.op)
        found[(*name, numbers[name])] = each.count
        numbers[name] += 1
    return found


def step_floor(counts: Iterable[Count], ceilings: Ceilings, dtype: str) -> float:
    """Microseconds below which no step of these products, keys and values can be."""
    total = sum(counts, Count())
    return ceilings.floor(total.must, total.operations, dtype, total.narrow) * 1e6


def kernel_lines(
    kernels: Sequence[Kernel], counts: Mapping[CallKey, Count], ceilings: Ceilings, dtype: str
) -> list[Line]:
    """A line for each kernel of an op of a module, the longest first."""
    found: dict[tuple[str, str, str], list[Kernel]] = defaultdict(list)
    calls: dict[tuple[str, str], set[CallKey]] = defaultdict(set)
    for each in kernels:
        module, op = ("", "") if each.call is None else (grouped(each.call[0]), each.call[1])
        found[module, op, each.name].append(each)
        if each.call is not None and op:
            calls[module, op].add(each.call)
    lines = [Line(*key, len(each), sum(k.added for k in each), 0.0) for key, each in found.items()]
    lines = shared(lines, span(kernels))
    totals: dict[tuple[str, str], float] = defaultdict(float)
    for line in lines:
        totals[line.module, line.op] += line.us
    told: set[tuple[str, str]] = set()
    for index, line in enumerate(lines):
        name = (line.module, line.op)
        if name in calls and name not in told:
            told.add(name)
            total = [counts.get(call, Count()) for call in calls[name]]
            lines[index] = against(line, total, totals[name], ceilings, dtype)
    return lines


def op_lines(
    runs: Sequence[Sequence[Slice]], counts: Mapping[CallKey, Count], ceilings: Ceilings, dtype: str
) -> list[Line]:
    """A line for each op of a module; microseconds are the median of the runs."""
    times: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(runs))
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for number, run in enumerate(runs):
        for each in run:
            if each.op:
                name = (grouped(each.module), each.op)
                times[name][number] += (each.ended - each.began) * 1e6
                calls[name] += number == 0
    listed: dict[tuple[str, str], list[Count]] = defaultdict(list)
    for (module, op, _), each_count in counts.items():
        listed[grouped(module), op].append(each_count)
    lines = [Line(*name, "", calls[name], statistics.median(each), 0.0) for name, each in times.items()]
    lines = [against(line, listed[line.module, line.op], line.us, ceilings, dtype) for line in lines]
    return shared(lines, sum(line.us for line in lines))


def against(line: Line, counts: Sequence[Count], us: float, ceilings: Ceilings, dtype: str) -> Line:
    """The line with its floor: the sum of the floors of its calls."""
    floor = sum(ceilings.floor(each.nbytes, each.operations, dtype, each.narrow) for each in counts) * 1e6
    total = sum(counts, Count())
    fraction = floor / us if us > 0 else None
    return replace(line, nbytes=total.nbytes, operations=total.operations, floor_us=floor, fraction=fraction)


def shared(lines: Iterable[Line], step: float) -> list[Line]:
    """The longest first, with their share of the step."""
    ordered = sorted(lines, key=lambda line: -line.us)
    return [replace(line, share=line.us / step if step else 0.0) for line in ordered]


def span(kernels: Sequence[Kernel]) -> float:
    """Microseconds from the first kernel's beginning to the last one's end."""
    return max(k.begins + k.lasts for k in kernels) - min(k.begins for k in kernels) if kernels else 0.0


def median_run(runs: Sequence[list[Kernel]]) -> list[Kernel]:
    """The run of the middle length."""
    return sorted(runs, key=span)[len(runs) // 2]


def gpu_events(kernels: Sequence[Kernel], counts: Mapping[CallKey, Count]) -> dict[str, list[chrome.Event]]:
    """Tracks of a trace: the kernels, and the layers that they belong to."""
    start = kernels[0].begins if kernels else 0.0
    events, layers = [], []
    for each in kernels:
        module, op, _ = each.call or ("", "", 0)
        args: dict[str, Any] = {"module": module, "op": op, "added_us": each.added, "gap_us": each.gap}
        made = counts.get(each.call) if each.call is not None else None
        if made is not None:
            args |= {"bytes": made.nbytes, "operations": made.operations}
        events.append(chrome.Event(each.name, each.begins - start, each.lasts, args))
        layers.append((".".join(module.split(".")[:2]) or "(other)", each))
    return {"kernels": events, "layers": _spans(layers, start)}


def _spans(layers: Sequence[tuple[str, Kernel]], start: float) -> list[chrome.Event]:
    """Neighbours of one name as one event; it ends where the last of them ends or the next name begins to count."""
    found: list[chrome.Event] = []
    for name, each in layers:
        begins, ends = each.begins - start + (each.lasts - each.added), each.begins - start + each.lasts
        if found and found[-1].name == name:
            found[-1] = replace(found[-1], lasts=max(found[-1].lasts, ends - found[-1].begins))
        else:
            found.append(chrome.Event(name, begins, max(0.0, ends - begins)))
    return found


def cpu_events(slices: Sequence[Slice]) -> dict[str, list[chrome.Event]]:
    """One track: modules with their ops inside."""
    start = min((each.began for each in slices), default=0.0)
    events = [
        chrome.Event(
            each.op or each.module,
            (each.began - start) * 1e6,
            (each.ended - each.began) * 1e6,
            {"module": each.module},
        )
        for each in slices
    ]
    return {"modules and ops": events}
