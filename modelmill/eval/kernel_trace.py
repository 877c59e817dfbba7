"""GPU kernels from the torch profiler (CUPTI): their times, and the op call that launched each.

A replayed CUDA graph shows its kernels but not the ops. So a step runs twice under the profiler:
once launched by Python, where every launch lies inside the label of its op, and once as the graph.
The n-th launch of a kernel's name belongs to the same call in both.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modelmill.eval.op_trace import parse_label

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class KernelRecord:
    """One kernel; times in microseconds.

    call: (module, op, number of the op's call) that launched it; None if unknown. added_us: how
    much later the step ended because of it, without its overlap with earlier kernels. gap_us: idle
    time before it.
    """

    name: str
    start_us: float
    duration_us: float
    call: tuple[str, str, int] | None = None
    added_us: float = 0.0
    gap_us: float = 0.0


def record_profiler_events(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """Return the profiler's events during ``run``, in Chrome's format."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about profiler cycles, which are not used here
        with torch.profiler.profile(activities=activities) as profiler:
            run()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]


def kernels_from_events(events: Iterable[Mapping[str, Any]]) -> list[KernelRecord]:
    """Return the GPU work in start order, each with the innermost label around its launch."""
    slices = [event for event in events if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: event
        for event in slices
        if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }
    labels = _labels_by_thread(slices)
    kernels = []
    for event in slices:
        if event.get("cat") in GPU_CATEGORIES:
            launch = launches.get(event.get("args", {}).get("correlation"))
            call = None if launch is None else _enclosing_label(labels, launch)
            kernels.append(
                KernelRecord(str(event["name"]), float(event["ts"]), float(event["dur"]), call)
            )
    return sorted(kernels, key=lambda kernel: kernel.start_us)


_Label = tuple[float, float, tuple[str, str, int]]


def _labels_by_thread(events: Iterable[Mapping[str, Any]]) -> dict[Any, list[_Label]]:
    """Return labels by thread in start order; calls of an op by a module are numbered."""
    labels: dict[Any, list[_Label]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for each in sorted(events, key=lambda event: float(event["ts"])):
        label = (
            parse_label(str(each["name"]))
            if each.get("cat") in ("user_annotation", "cpu_op")
            else None
        )
        if label is not None:
            start = float(each["ts"])
            labels[each.get("pid"), each.get("tid")].append(
                (start, start + float(each["dur"]), (*label, counts[label]))
            )
            counts[label] += 1
    return labels


def _enclosing_label(
    labels: Mapping[Any, list[_Label]], launch: Mapping[str, Any]
) -> tuple[str, str, int] | None:
    """Return the innermost label around a launch: the last to start that has not ended."""
    thread_labels, launch_time = (
        labels.get((launch.get("pid"), launch.get("tid")), []),
        float(launch["ts"]),
    )
    for index in range(
        bisect_right(thread_labels, launch_time, key=lambda label: label[0]) - 1, -1, -1
    ):
        if thread_labels[index][1] >= launch_time:
            return thread_labels[index][2]
    return None


def label_graph_kernels(
    labeled: Sequence[KernelRecord], kernels: Sequence[KernelRecord]
) -> list[KernelRecord]:
    """Give graph kernels the calls of the Python-launched ones, in order for each name."""
    calls_by_name: dict[str, deque[tuple[str, str, int] | None]] = defaultdict(deque)
    for kernel in labeled:
        calls_by_name[kernel.name].append(kernel.call)
    return [
        replace(
            kernel,
            call=calls_by_name[kernel.name].popleft() if calls_by_name[kernel.name] else None,
        )
        for kernel in kernels
    ]


def with_gap_and_added_times(kernels: Sequence[KernelRecord]) -> list[KernelRecord]:
    """Compute the time that each kernel adds to the step, and the idle time before it.

    Kernels may overlap: a kernel is charged only from the end of the kernels before it.
    """
    records, busy_until = [], kernels[0].start_us if kernels else 0.0
    for kernel in kernels:
        end = kernel.start_us + kernel.duration_us
        gap = max(0.0, kernel.start_us - busy_until)
        records.append(
            replace(kernel, gap_us=gap, added_us=max(0.0, end - max(busy_until, kernel.start_us)))
        )
        busy_until = max(busy_until, end)
    return records


def split_kernels_by_run(kernels: Sequence[KernelRecord], count: int) -> list[list[KernelRecord]]:
    """Split the kernels of ``count`` equal consecutive runs.

    All of them are returned as one run if their number is not a multiple of ``count``.
    """
    run_length, remainder = divmod(len(kernels), count)
    if remainder or not run_length:
        return [list(kernels)]
    return [list(kernels[i * run_length : (i + 1) * run_length]) for i in range(count)]
