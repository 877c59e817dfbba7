"""Kernels of a GPU as torch's profiler (CUPTI) saw them: their times, and which call of which op
launched them.

A recorded graph shows its kernels, but not who asked for them. So a step runs twice under the
profiler: once launched by Python, where every launch lies inside the label of its op, and as the
graph. The n-th launch of a kernel's name belongs to the same call in both.
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
    """Microseconds. call: (module, op, number of the op's call) that launched it; None where that
    is not known.

    added_us: how much later the step ended for it, since the kernel in front may still have run.
    gap_us: idle time before it.
    """

    name: str
    start_us: float
    duration_us: float
    call: tuple[str, str, int] | None = None
    added_us: float = 0.0
    gap_us: float = 0.0


def profile_events(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """The events of the profiler while ``run`` runs, in Chrome's format."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of cycles, which are not used here
        with torch.profiler.profile(activities=kinds) as seen:
            run()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]


def kernels_from_events(events: Iterable[Mapping[str, Any]]) -> list[KernelRecord]:
    """The device's work, in the order in which it began, each with the innermost label that its
    launch lies in.
    """
    listed = [each for each in events if each.get("ph") == "X"]
    launches = {
        each["args"]["correlation"]: each
        for each in listed
        if each.get("cat") in LAUNCH_CATEGORIES and "correlation" in each.get("args", {})
    }
    labels = _labels_by_thread(listed)
    found = []
    for each in listed:
        if each.get("cat") in GPU_CATEGORIES:
            launch = launches.get(each.get("args", {}).get("correlation"))
            call = None if launch is None else _enclosing_label(labels, launch)
            found.append(
                KernelRecord(str(each["name"]), float(each["ts"]), float(each["dur"]), call)
            )
    return sorted(found, key=lambda kernel: kernel.start_us)


_Label = tuple[float, float, tuple[str, str, int]]


def _labels_by_thread(events: Iterable[Mapping[str, Any]]) -> dict[Any, list[_Label]]:
    """Labels by thread, in the order in which they began; calls of an op by a module are
    numbered.
    """
    found: dict[Any, list[_Label]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for each in sorted(events, key=lambda event: float(event["ts"])):
        label = (
            parse_label(str(each["name"]))
            if each.get("cat") in ("user_annotation", "cpu_op")
            else None
        )
        if label is not None:
            begins = float(each["ts"])
            found[each.get("pid"), each.get("tid")].append(
                (begins, begins + float(each["dur"]), (*label, counts[label]))
            )
            counts[label] += 1
    return found


def _enclosing_label(
    labels: Mapping[Any, list[_Label]], launch: Mapping[str, Any]
) -> tuple[str, str, int] | None:
    """The innermost label around a launch: the last to begin of those that have not ended."""
    mine, at = labels.get((launch.get("pid"), launch.get("tid")), []), float(launch["ts"])
    for index in range(bisect_right(mine, at, key=lambda label: label[0]) - 1, -1, -1):
        if mine[index][1] >= at:
            return mine[index][2]
    return None


def label_graph_kernels(
    labeled: Sequence[KernelRecord], kernels: Sequence[KernelRecord]
) -> list[KernelRecord]:
    """Kernels of a graph with the calls of those that Python launched, in order for each name."""
    waiting: dict[str, deque[tuple[str, str, int] | None]] = defaultdict(deque)
    for each in labeled:
        waiting[each.name].append(each.call)
    return [
        replace(each, call=waiting[each.name].popleft() if waiting[each.name] else None)
        for each in kernels
    ]


def timeline(kernels: Sequence[KernelRecord]) -> list[KernelRecord]:
    """What each kernel adds to the time of the step, and how long nothing ran before it.

    Kernels may overlap: one that began early, and waited, is charged from where the one in front
    ended.
    """
    found, done = [], kernels[0].start_us if kernels else 0.0
    for each in kernels:
        ends = each.start_us + each.duration_us
        gap = max(0.0, each.start_us - done)
        found.append(replace(each, gap_us=gap, added_us=max(0.0, ends - max(done, each.start_us))))
        done = max(done, ends)
    return found


def split_runs(kernels: Sequence[KernelRecord], count: int) -> list[list[KernelRecord]]:
    """The kernels of ``count`` equal runs, one after another; all of them as one where they cannot
    be told apart.
    """
    each, left = divmod(len(kernels), count)
    if left or not each:
        return [list(kernels)]
    return [list(kernels[i * each : (i + 1) * each]) for i in range(count)]
