"""From a profiler's events to kernels with their ops: events are made up, as CUPTI writes them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelmill.eval.kernel_trace import (
    KernelRecord,
    kernels_from_events,
    label_graph_kernels,
    split_kernels_by_run,
    with_gap_and_added_times,
)
from modelmill.eval.op_trace import make_label


def label(module: str, op: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": make_label(module, op),
        "pid": 9,
        "tid": tid,
        "ts": ts,
        "dur": dur,
    }


def launch(number: int, ts: float, cat: str = "cuda_runtime", tid: int = 1) -> dict[str, Any]:
    event = {
        "ph": "X",
        "cat": cat,
        "name": "cudaLaunchKernel",
        "pid": 9,
        "tid": tid,
        "ts": ts,
        "dur": 1,
    }
    return {**event, "args": {"correlation": number}}


def kernel(
    number: int, name: str, ts: float, dur: float = 5, cat: str = "kernel"
) -> dict[str, Any]:
    event = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur}
    return {**event, "args": {"correlation": number}}


EVENTS = [
    {"ph": "M", "name": "process_name"},
    label("layers.0", "", 0, 100),
    label("layers.0.mlp", "linear", 10, 20),
    launch(1, 15, "cuda_driver"),
    label("layers.0.mlp", "linear", 40, 20),
    launch(2, 45),
    launch(3, 70),
    launch(4, 200),
    launch(5, 15, tid=2),
    kernel(4, "argmax", 300),
    kernel(1, "gemv", 210),
    kernel(2, "gemv", 220),
    kernel(3, "copy", 230, cat="gpu_memcpy"),
    kernel(5, "elsewhere", 240),
    {
        "ph": "X",
        "cat": "gpu_user_annotation",
        "name": make_label("x", "y"),
        "ts": 0,
        "dur": 999,
        "pid": 0,
        "tid": 7,
    },
]


def test_a_kernel_belongs_to_the_innermost_label_of_its_launch() -> None:
    kernels = kernels_from_events(EVENTS)
    assert [(each.name, each.call) for each in kernels] == [
        ("gemv", ("layers.0.mlp", "linear", 0)),
        ("gemv", ("layers.0.mlp", "linear", 1)),
        ("copy", ("layers.0", "", 0)),
        ("elsewhere", None),
        ("argmax", None),
    ]


def test_a_graph_learns_from_launches_by_name_and_order() -> None:
    known = kernels_from_events(EVENTS)
    graph = [
        KernelRecord("memset", 0, 1),
        KernelRecord("gemv", 1, 1),
        KernelRecord("argmax", 2, 1),
        KernelRecord("gemv", 3, 1),
        KernelRecord("gemv", 4, 1),
    ]
    calls = [each.call for each in label_graph_kernels(known, graph)]
    assert calls == [None, ("layers.0.mlp", "linear", 0), None, ("layers.0.mlp", "linear", 1), None]


def test_overlap_is_charged_once_and_gaps_are_seen() -> None:
    """a: 0 to 10; b begins early at 6 and ends at 14; c lies within b; d begins 3 after."""
    kernels = with_gap_and_added_times(
        [
            KernelRecord("a", 0, 10),
            KernelRecord("b", 6, 8),
            KernelRecord("c", 7, 2),
            KernelRecord("d", 17, 3),
        ]
    )
    assert [(each.added_us, each.gap_us) for each in kernels] == [(10, 0), (4, 0), (0, 0), (3, 3)]


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 50)), min_size=1, max_size=30))
def test_what_is_added_and_the_gaps_make_the_step(times: list[tuple[float, float]]) -> None:
    kernels = [
        KernelRecord(str(i), begins, lasts) for i, (begins, lasts) in enumerate(sorted(times))
    ]
    records = with_gap_and_added_times(kernels)
    step_us = max(k.start_us + k.duration_us for k in kernels) - kernels[0].start_us
    assert sum(k.added_us + k.gap_us for k in records) == pytest.approx(step_us, abs=1e-6)


def test_equal_runs_are_distinguished() -> None:
    kernels = [KernelRecord(str(i), i, 1) for i in range(6)]
    assert [[k.name for k in run] for run in split_kernels_by_run(kernels, 3)] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
    ]
    assert len(split_kernels_by_run(kernels, 4)) == 1
    assert split_kernels_by_run([], 3) == [[]]
