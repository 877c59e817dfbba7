"""Lines of a profile and tracks of its trace: kernel and op times with roofline minimums."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from modelmill.eval import chrome_trace
from modelmill.eval.kernel_trace import KernelRecord
from modelmill.eval.op_trace import TraceSlice, module_name_pattern
from modelmill.eval.roofline import RooflineCeilings
from modelmill.ops.op_cost import OpCost

CallKey = tuple[str, str, int]  # module, op, number of the call


@dataclass(frozen=True)
class ProfileLine:
    """A kernel of an op of a module, summed over all layers. us: microseconds per step.

    nbytes, operations, floor_us, fraction: of the op with all its kernels, on the line of its
    longest kernel; None on its other lines and where nothing is counted.
    """

    module: str
    op: str
    kernel: str
    calls: int
    us: float
    share: float = 0.0
    nbytes: int | None = None
    operations: int | None = None
    floor_us: float | None = None
    fraction: float | None = None


def costs_by_call(calls: Sequence[TraceSlice]) -> dict[CallKey, OpCost]:
    """Return the cost of every call; calls of an op by a module are numbered in order."""
    numbers: dict[tuple[str, str], int] = defaultdict(int)
    costs: dict[CallKey, OpCost] = {}
    for each in calls:
        name = (each.module, each.op)
        costs[(*name, numbers[name])] = each.cost
        numbers[name] += 1
    return costs


def roofline_step_us(costs: Iterable[OpCost], roofline: RooflineCeilings, dtype: str) -> float:
    """Return the roofline minimum of a step in microseconds."""
    total = sum(costs, OpCost())
    return (
        roofline.min_seconds(
            total.unavoidable_bytes, total.operations, dtype, total.ops_by_8bit_dtype
        )
        * 1e6
    )


def kernel_lines(
    kernels: Sequence[KernelRecord],
    costs: Mapping[CallKey, OpCost],
    roofline: RooflineCeilings,
    dtype: str,
) -> list[ProfileLine]:
    """Make a line for each kernel of an op of a module, the longest first."""
    kernels_by_line: dict[tuple[str, str, str], list[KernelRecord]] = defaultdict(list)
    calls: dict[tuple[str, str], set[CallKey]] = defaultdict(set)
    for each in kernels:
        module, op = (
            ("", "") if each.call is None else (module_name_pattern(each.call[0]), each.call[1])
        )
        kernels_by_line[module, op, each.name].append(each)
        if each.call is not None and op:
            calls[module, op].add(each.call)
    lines = [
        ProfileLine(*key, len(each), sum(k.added_us for k in each))
        for key, each in kernels_by_line.items()
    ]
    lines = sort_and_add_shares(lines, kernels_elapsed_us(kernels))
    totals: dict[tuple[str, str], float] = defaultdict(float)
    for line in lines:
        totals[line.module, line.op] += line.us
    counted: set[tuple[str, str]] = set()
    for index, line in enumerate(lines):
        name = (line.module, line.op)
        if name in calls and name not in counted:
            counted.add(name)
            total = [costs.get(call, OpCost()) for call in calls[name]]
            lines[index] = with_roofline_time(line, total, totals[name], roofline, dtype)
    return lines


def op_lines(
    runs: Sequence[Sequence[TraceSlice]],
    costs: Mapping[CallKey, OpCost],
    roofline: RooflineCeilings,
    dtype: str,
) -> list[ProfileLine]:
    """Make a line for each op of a module; microseconds are the median of the runs."""
    times: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * len(runs))
    calls: dict[tuple[str, str], int] = defaultdict(int)
    for number, run in enumerate(runs):
        for each in run:
            if each.op:
                name = (module_name_pattern(each.module), each.op)
                times[name][number] += (each.end - each.start) * 1e6
                calls[name] += number == 0
    costs_by_op: dict[tuple[str, str], list[OpCost]] = defaultdict(list)
    for (module, op, _), cost in costs.items():
        costs_by_op[module_name_pattern(module), op].append(cost)
    lines = [
        ProfileLine(*name, "", calls[name], statistics.median(each)) for name, each in times.items()
    ]
    lines = [
        with_roofline_time(line, costs_by_op[line.module, line.op], line.us, roofline, dtype)
        for line in lines
    ]
    return sort_and_add_shares(lines, sum(line.us for line in lines))


def with_roofline_time(
    line: ProfileLine, costs: Sequence[OpCost], us: float, roofline: RooflineCeilings, dtype: str
) -> ProfileLine:
    """Add the roofline time to a line: the sum over its calls."""
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


def sort_and_add_shares(lines: Iterable[ProfileLine], step: float) -> list[ProfileLine]:
    """Sort lines, the longest first, and add their share of the step."""
    ordered = sorted(lines, key=lambda line: -line.us)
    return [replace(line, share=line.us / step if step else 0.0) for line in ordered]


def kernels_elapsed_us(kernels: Sequence[KernelRecord]) -> float:
    """Microseconds from the start of the first kernel to the end of the last."""
    return (
        max(k.start_us + k.duration_us for k in kernels) - min(k.start_us for k in kernels)
        if kernels
        else 0.0
    )


def median_run(runs: Sequence[list[KernelRecord]]) -> list[KernelRecord]:
    """Return the run of median length."""
    return sorted(runs, key=kernels_elapsed_us)[len(runs) // 2]


def gpu_trace_tracks(
    kernels: Sequence[KernelRecord], costs: Mapping[CallKey, OpCost]
) -> dict[str, list[chrome_trace.TraceEvent]]:
    """Make the tracks of a trace: the kernels, and the layers that they belong to."""
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
        cost = costs.get(each.call) if each.call is not None else None
        if cost is not None:
            args |= {"bytes": cost.nbytes, "operations": cost.operations}
        events.append(
            chrome_trace.TraceEvent(each.name, each.start_us - start, each.duration_us, args)
        )
        layers.append((".".join(module.split(".")[:2]) or "(other)", each))
    return {"kernels": events, "layers": _merge_layer_events(layers, start)}


def _merge_layer_events(
    layers: Sequence[tuple[str, KernelRecord]], start: float
) -> list[chrome_trace.TraceEvent]:
    """Merge consecutive kernels of one layer into one event.

    An event ends where its last kernel ends.
    """
    events: list[chrome_trace.TraceEvent] = []
    for name, each in layers:
        start_us, end_us = (
            each.start_us - start + (each.duration_us - each.added_us),
            each.start_us - start + each.duration_us,
        )
        if events and events[-1].name == name:
            events[-1] = replace(
                events[-1], duration_us=max(events[-1].duration_us, end_us - events[-1].start_us)
            )
        else:
            events.append(chrome_trace.TraceEvent(name, start_us, max(0.0, end_us - start_us)))
    return events


def cpu_trace_tracks(slices: Sequence[TraceSlice]) -> dict[str, list[chrome_trace.TraceEvent]]:
    """Make one track: modules with their ops inside."""
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
