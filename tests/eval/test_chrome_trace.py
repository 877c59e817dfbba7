"""The trace file: what Perfetto needs of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelmill.core.errors import UsageError
from modelmill.eval.chrome_trace import TraceEvent, assign_lanes, make_trace, write_trace

EVENTS = st.lists(
    st.builds(
        TraceEvent,
        st.sampled_from("abc"),
        st.floats(0, 100),
        st.floats(0, 30),
    ),
    max_size=25,
)


def check_trace(traced: Any) -> None:
    """Chrome's trace event format: complete slices and metadata; slices of a thread nest or stand
    apart.
    """
    assert isinstance(traced["traceEvents"], list)
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    named = set()
    for event in traced["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert event["args"]["name"]
            named.add((event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in named
        begin, duration = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
        threads.setdefault((event["pid"], event["tid"]), []).append((begin, begin + duration))
    for slices in threads.values():
        for i, (begins, ends) in enumerate(slices):
            for other_begins, other_ends in slices[i + 1 :]:
                apart = ends <= other_begins or other_ends <= begins
                nested = (begins <= other_begins and other_ends <= ends) or (
                    other_begins <= begins and ends <= other_ends
                )
                assert apart or nested


@given(EVENTS, EVENTS)
def test_a_trace_is_as_perfetto_reads_it(
    kernels: list[TraceEvent], layers: list[TraceEvent]
) -> None:
    tracks = {"decode": {"kernels": kernels, "layers": layers}, "prefill": {"kernels": layers}}
    traced = make_trace(tracks, {"device": "NVIDIA H200", "ceilings": {"memory_gbps": 4200}})
    check_trace(json.loads(json.dumps(traced)))
    slices = [each for each in traced["traceEvents"] if each["ph"] == "X"]
    assert len(slices) == len(kernels) + 2 * len(layers)


@given(EVENTS)
def test_lanes_lose_nothing(events: list[TraceEvent]) -> None:
    lanes = assign_lanes(events)
    assert sorted(map(repr, (each for lane in lanes for each in lane))) == sorted(map(repr, events))


def test_overlap_takes_a_second_lane_and_nesting_does_not() -> None:
    a, inside, crossing = TraceEvent("a", 0, 10), TraceEvent("b", 2, 3), TraceEvent("c", 8, 10)
    assert assign_lanes([crossing, inside, a]) == [[a, inside], [crossing]]


def test_a_path_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    write_trace(tmp_path / "deep" / "t.json", make_trace({}, {}))
    with pytest.raises(UsageError):
        write_trace(tmp_path, make_trace({}, {}))
