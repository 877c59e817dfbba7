"""Captures of calls: where they run, what they share, what their errors become."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelmill.ops.cuda_graph import GraphCapturer, NotCapturable

PACKAGE = Path(__file__).resolve().parents[2] / "modelmill"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called of torch.cuda, in order."""
    noted: list[Any] = []

    def end() -> None:
        assert not gc.isenabled(), "garbage may be collected before the end of the capture"
        noted.append("end")

    graph = SimpleNamespace(
        replay=lambda: noted.append("replay"),
        capture_begin=lambda **options: noted.append(("begin", options)),
        capture_end=end,
    )

    @contextmanager
    def capturing(graph: Any, **options: Any) -> Iterator[None]:
        noted.append(("graph", options))
        yield
        end()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    return noted


@pytest.mark.parametrize("shared", [True, False])
def test_a_capture(calls: list[Any], shared: bool) -> None:
    captured = GraphCapturer(shared_pool=shared).capture(lambda: calls.append("call") or 7)
    options = {
        "pool": "pool" if shared else None,
        "stream": None,
        "capture_error_mode": "thread_local",
    }
    assert calls == [("graph", options), "call", "end"]
    assert captured.replay() == captured.output == 7
    assert calls[3:] == ["replay"]


def test_a_capture_within_a_request(calls: list[Any]) -> None:
    capturer = GraphCapturer()
    begin = ("begin", {"pool": "pool", "capture_error_mode": "thread_local"})
    captured = capturer.capture_on_current_stream(lambda: calls.append("call") or 7)
    assert calls == [begin, "call", "end"]
    assert captured.output == 7


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("method", ["capture", "capture_on_current_stream"])
@pytest.mark.usefixtures("calls")
def test_no_garbage_is_collected_during_a_capture(method: str) -> None:
    """The graphs of a dropped engine may be garbage: freeing one makes the capture invalid."""
    freed: list[str] = []

    def call() -> None:
        weakref.finalize(Cycle(), freed.append, "freed")
        for _ in range(3 * gc.get_threshold()[0]):
            Cycle()
        assert not freed

    assert gc.isenabled()
    getattr(GraphCapturer(), method)(call)
    assert gc.isenabled()
    gc.collect()
    assert freed == ["freed"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("it waits for the host"), NotCapturable),
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
    ],
)
def test_a_capture_that_fails_is_ended(
    calls: list[Any], error: Exception, raised: type[Exception]
) -> None:
    def call() -> None:
        raise error

    with pytest.raises(raised, match=str(error)):
        GraphCapturer().capture_on_current_stream(call)
    assert calls[-1] == "end"


def test_graphs_are_captured_in_one_module() -> None:
    pattern = re.compile(r"torch\.cuda\.(CUDAGraph|graph|graph_pool_handle)\(|capture_begin\(")
    files = {p for p in PACKAGE.rglob("*.py") if pattern.search(p.read_text())}
    assert files == {PACKAGE / "ops" / "cuda_graph.py"}
