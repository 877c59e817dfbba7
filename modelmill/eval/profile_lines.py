"""The lines of a profile, and the tracks of its trace: what kernels and ops took, beside their
floors.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelmill.eval import chrome_trace
from modelmill.eval.kernel_trace import KernelRecord
from modelmill.eval.op_cost import OpCost
from modelmill.eval.op_trace import TraceSlice, layer_group_name
from modelmill.eval.roofline import Roofline

CallKey = tuple[str, str, int]  # module, op, number of the call


@dataclass(frozen=True)
class ProfileLine:
    """A kernel of an op of a module, all layers together. us: microseconds of a step.

    nbytes, operations, floor_us, fraction: of the op with all its kernels, on the line of the
    longest; None on its others and where nothing is counted.
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


def costs_by_call(calls: Sequence[TraceSlice]) -> dict[CallKey, OpCost]:
    """The count of every call; calls of one op by one module are numbered in order."""
    numbers: dict[tuple[str, str], int] = defaultdict(int)
    found: dict[CallKey, OpCost] = {}
    for each in calls:
        name = (each.module, each.op)
        found[(*name, numbers[name])] = each.cost
        numbers[name] += 1
    return found


def min_step_us(costs: Iterable[OpCost], roofline: Roofline, dtype: str) -> float:
    """Microseconds below which no step of these products, keys and values can be."""
    total = sum(costs, OpCost())
    return (
        roofline.min_seconds(
            total.unavoidable_bytes, total.operations, dtype, total.ops_by_8bit_dtype
        )
        * 1e6
    )


def kernel_lines(
    kernels: Sequence[KernelRecord], costs: Mapping[CallKey, OpCost], roofline: Roofline, dtype: str
) -> list[ProfileLine]:
    """A line for each kernel of an op of a module, the longest first."""
    found: dict[tuple[str, str, str], list[KernelRecord]] = defaultdict(list)
    calls: dict[tuple[str, str], set[CallKey]] = defaultdict(set)
    for each in kernels:
        module, op = (
            ("", "") if each.call is None else (layer_group_name(each.call[0]), each.call[1])
        )
        found[module, op, each.name].append(each)
        if each.call is not None and op:
            calls[module, op].add(each.call)
    lines = [
        ProfileLine(*key, len(each), sum(k.added_us for k in each), 0.0)
        for key, each in found.items()
    ]
    lines = with_shares(lines, elapsed_us(kernels))
    totals: dict[tuple[str, str], float] = defaultdict(float)
    for line in lines:
        totals[line.module, line.op] += line.us
    told: set[tuple[str, str]] = set()
    for index, line in enumerate(lines):
        name = (line.module, line.op)
        if name in calls and name not in told:
            told.add(name)
            total = [costs.get(call, OpCost()) for call in calls[name]]
            lines[index] = with_floor(line, total, totals[name], roofline, dtype)
    return lines


def op_lines(
    runs: Sequence[Sequence[TraceSlice]],
    costs: Mapping[CallKey, OpCost],
    roofline: Roofline,
    dtype: str,
) -> list[ProfileLine]:
    """A line for each op of a module; microseconds are the median of the runs."""
    times: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(runs))
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for number, run in enumerate(runs):
        for each in run:
            if each.op:
                name = (layer_group_name(each.module), each.op)
                times[name][number] += (each.end - each.start) * 1e6
                calls[name] += number == 0
    listed: dict[tuple[str, str], list[OpCost]] = defaultdict(list)
    for (module, op, _), each_count in costs.items():
        listed[layer_group_name(module), op].append(each_count)
    lines = [
        ProfileLine(*name, "", calls[name], statistics.median(each), 0.0)
        for name, each in times.items()
    ]
    lines = [
        with_floor(line, listed[line.module, line.op], line.us, roofline, dtype) for line in lines
    ]
    return with_shares(lines, sum(line.us for line in lines))


def with_floor(
    line: ProfileLine, costs: Sequence[OpCost], us: float, roofline: Roofline, dtype: str
) -> ProfileLine:
    """The line with its floor: the sum of the floors of its calls."""
    floor = (
        sum(
            roofline.min_seconds(each.nbytes, each.operations, dtype, each.ops_by_8bit_dtype)
            for each in costs
        )
        * 1e6
    )
    total = sum(costs, OpCost())
    fraction = floor / us if us > 0 else None
    return replace(
        line, nbytes=total.nbytes, operations=total.operations, floor_us=floor, fraction=fraction
    )


def with_shares(lines: Iterable[ProfileLine], step: float) -> list[ProfileLine]:
    """The longest first, with their share of the step."""
    ordered = sorted(lines, key=lambda line: -line.us)
    return [replace(line, share=line.us / step if step else 0.0) for line in ordered]


def elapsed_us(kernels: Sequence[KernelRecord]) -> float:
    """Microseconds from the first kernel's beginning to the last one's end."""
    return (
        max(k.start_us + k.duration_us for k in kernels) - min(k.start_us for k in kernels)
        if kernels
        else 0.0
    )


def median_run(runs: Sequence[list[KernelRecord]]) -> list[KernelRecord]:
    """The run of the middle length."""
    return sorted(runs, key=elapsed_us)[len(runs) // 2]


def gpu_events(
    kernels: Sequence[KernelRecord], costs: Mapping[CallKey, OpCost]
) -> dict[str, list[chrome_trace.TraceEvent]]:
    """Tracks of a trace: the kernels, and the layers that they belong to."""
    start = kernels[0].start_us if kernels else 0.0
    events, layers = [], []
    for each in kernels:
        module, op, _ = each.call or ("", "", 0)
        args: dict[str, Any] = {
            "module": module,
            "op": op,
            "added_us": each.added_us,
            "gap_us": each.gap_us,
        }
        made = costs.get(each.call) if each.call is not None else None
        if made is not None:
            args |= {"bytes": made.nbytes, "operations": made.operations}
        events.append(
            chrome_trace.TraceEvent(each.name, each.start_us - start, each.duration_us, args)
        )
        layers.append((".".join(module.split(".")[:2]) or "(other)", each))
    return {"kernels": events, "layers": _merge_layers(layers, start)}


def _merge_layers(
    layers: Sequence[tuple[str, KernelRecord]], start: float
) -> list[chrome_trace.TraceEvent]:
    """Neighbours of one name as one event; it ends where the last of them ends or the next name
    begins to count.
    """
    found: list[chrome_trace.TraceEvent] = []
    for name, each in layers:
        begins, ends = (
            each.start_us - start + (each.duration_us - each.added_us),
            each.start_us - start + each.duration_us,
        )
        if found and found[-1].name == name:
            found[-1] = replace(
                found[-1], duration_us=max(found[-1].duration_us, ends - found[-1].start_us)
            )
        else:
            found.append(chrome_trace.TraceEvent(name, begins, max(0.0, ends - begins)))
    return found


def cpu_events(slices: Sequence[TraceSlice]) -> dict[str, list[chrome_trace.TraceEvent]]:
    """One track: modules with their ops inside."""
    start = min((each.start for each in slices), default=0.0)
    events = [
        chrome_trace.TraceEvent(
            each.op or each.module,
            (each.start - start) * 1e6,
            (each.end - each.start) * 1e6,
            {"module": each.module},
        )
        for each in slices
    ]
    return {"modules and ops": events}
