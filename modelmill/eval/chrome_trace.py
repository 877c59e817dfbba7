"""A trace in Chrome's format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

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
    """One slice: microseconds from the beginning of its track. args: what a click on it shows."""

    name: str
    start_us: float
    duration_us: float
    args: Mapping[str, Any] = field(default_factory=dict)


def make_trace(
    tracks: Mapping[str, Mapping[str, Sequence[TraceEvent]]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """JSON-able. tracks: process → track → events. Events of a track that overlap are spread over
    lanes.

    On one lane slices must lie beside or inside one another; two kernels of which the second begins
    before the first ends are neither.
    """
    events: list[dict[str, Any]] = []
    for pid, (process, named) in enumerate(tracks.items(), 1):
        events.append(_metadata_event("process_name", pid, 0, process))
        tid = 0
        for name, content in named.items():
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
    """The events on as few lanes as needed for no two to cross; one inside another shares its
    lane.
    """
    found: list[list[TraceEvent]] = []
    # of each lane the ends of the slices that are still open, outermost first
    open_: list[list[float]] = []
    for event in sorted(events, key=lambda each: (each.start_us, -each.duration_us)):
        ends = event.start_us + event.duration_us
        for lane, ending in zip(found, open_, strict=True):
            while ending and ending[-1] <= event.start_us:
                ending.pop()
            if not ending or ends <= ending[-1]:
                lane.append(event)
                ending.append(ends)
                break
        else:
            found.append([event])
            open_.append([ends])
    return found


def check_output_file(path: Path) -> None:
    """Raises UsageError where a file stands that is no trace; a former one is replaced."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            former = file.read(len(_TRACE_START)) == _TRACE_START
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; choose another file") from None
    if not former:
        raise UsageError(f"{path} exists and is no trace; choose another file, or remove it")


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Raises UsageError where the file cannot be written, or another file stands there."""
    check_output_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another file") from None


def _metadata_event(event_name: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": event_name, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _slice_event(event: TraceEvent, pid: int, tid: int) -> dict[str, Any]:
    times = {"ts": round(event.start_us, 3), "dur": round(event.duration_us, 3)}
    return {
        "ph": "X",
        "cat": "op",
        "name": event.name,
        "pid": pid,
        "tid": tid,
        **times,
        "args": dict(event.args),
    }
