"""Traces in Chrome's format, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelmill.core.errors import UsageError

_TRACE_START = b'{"traceEvents"'


@dataclass(frozen=True)
class TraceEvent:
    """One slice, in microseconds from the start of its track; ``args`` are its details."""

    name: str
    start_us: float
    duration_us: float
    args: Mapping[str, Any] = field(default_factory=dict)


def make_trace(
    tracks: Mapping[str, Mapping[str, Sequence[TraceEvent]]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Make a JSON-serializable trace of process → track → events.

    Slices of one lane must be disjoint or nested, so overlapping events of a track, such as two
    overlapping kernels, go to separate lanes.
    """
    events: list[dict[str, Any]] = []
    for pid, (process, process_tracks) in enumerate(tracks.items(), 1):
        events.append(_metadata_event("process_name", pid, 0, process))
        tid = 0
        for name, content in process_tracks.items():
            for number, lane in enumerate(assign_lanes(content)):
                tid += 1
                events.append(
                    _metadata_event(
                        "thread_name", pid, tid, name if number == 0 else f"{name} (overlapping)"
                    )
                )
                events += [_slice_event(each, pid, tid) for each in lane]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {k: str(v) for k, v in about.items()},
    }


def assign_lanes(events: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """Distribute events over as few lanes as possible; nested events share a lane.

    They are compared in nanoseconds, as they are written: rounded, slices that touch may overlap.
    """
    lanes: list[list[TraceEvent]] = []
    # for each lane the ends of its open slices, outermost first
    open_ends: list[list[int]] = []
    timed = [(*_event_bounds_ns(event), event) for event in events]
    for begin, end, event in sorted(timed, key=lambda each: (each[0], -each[1])):
        for lane, lane_ends in zip(lanes, open_ends, strict=True):
            while lane_ends and lane_ends[-1] <= begin:
                lane_ends.pop()
            if not lane_ends or end <= lane_ends[-1]:
                lane.append(event)
                lane_ends.append(end)
                break
        else:
            lanes.append([event])
            open_ends.append([end])
    return lanes


def check_trace_overwrite(path: Path) -> None:
    """Raise UsageError if the file exists and is not a trace; a trace is replaced."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            is_trace = file.read(len(_TRACE_START)) == _TRACE_START
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; choose another file") from None
    if not is_trace:
        raise UsageError(f"{path} exists and is not a trace; choose another file or remove it")


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write the trace to ``path``.

    Raises UsageError if the file cannot be written, or exists and is not a trace.
    """
    check_trace_overwrite(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another file") from None


def _event_bounds_ns(event: TraceEvent) -> tuple[int, int]:
    """The begin and the end of an event."""
    return round(event.start_us * 1e3), round((event.start_us + event.duration_us) * 1e3)


def _metadata_event(event_name: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": event_name, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _slice_event(event: TraceEvent, pid: int, tid: int) -> dict[str, Any]:
    begin, end = _event_bounds_ns(event)
    times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {
        "ph": "X",
        "cat": "op",
        "name": event.name,
        "pid": pid,
        "tid": tid,
        **times,
        "args": dict(event.args),
    }
