"""Timing: alternating calls, series of short calls, device limits, captured graphs."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelmill.ops import timing


def test_calls_take_turns() -> None:
    order: list[str] = []
    samples = timing.time_interleaved(
        [lambda: order.append("a"), lambda: order.append("b")], 2, [1, 3]
    )
    assert "".join(order) == "ab" + "abbb" * 2
    assert [len(each) for each in samples] == [2, 2]
    assert all(seconds >= 0 for each in samples for seconds in each)


def test_short_calls_are_timed_in_rows() -> None:
    assert timing.count_calls_for_duration(lambda: None, 1.0, max_calls=50) == 50
    assert timing.count_calls_for_duration(lambda: sum(range(20000)), 1e-9) == 1


def test_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BANDWIDTH_COPY_BYTES", {"cpu": 1 << 18})
    monkeypatch.setattr(timing, "MATMUL_SIZE", {"cpu": 64})
    assert timing.measure_memory_bandwidth("cpu") >= timing.copy_bandwidth("cpu") / 10 > 0
    assert timing.matmul_throughput("cpu", torch.float32) > 0
    read, size = timing.make_cpu_memory_read_with_bytes()
    read()
    assert size == 1 << 18


def test_products_of_8_bits_have_a_rate_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MATMUL_SIZE", {"cpu": 64})
    assert (timing.matmul_throughput("cpu", torch.int8) or 0) > 0
    multiply, operations = timing.make_square_matmul_with_op_count("cpu", torch.int8)
    assert (multiply().dtype, operations) == (torch.int32, 2 * 64**3)

    def missing(*_: object) -> torch.Tensor:
        raise RuntimeError("not on this device")

    def short(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "_int_mm", missing)
    assert timing.matmul_throughput("cpu", torch.int8) is None
    monkeypatch.setattr(torch, "_int_mm", short)
    with pytest.raises(torch.OutOfMemoryError):
        timing.matmul_throughput("cpu", torch.int8)
    monkeypatch.setattr(timing, "time_interleaved", missing)
    with pytest.raises(RuntimeError, match="not on this device"):
        timing.matmul_throughput("cpu", torch.float32)


def test_a_recording_keeps_the_tensors_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph knows addresses only: memory that is given back while it is replayed would be read as
    garbage.
    """
    replayed: list[int] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes: dict[str, Any] = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda chosen: nullcontext(),
        "synchronize": lambda: None,
        "graph": lambda *args, **options: nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: replayed.append(1)),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def recording() -> tuple[Any, Any]:
        tensor = torch.ones(4)
        return timing.capture_graph(lambda: tensor.add_(1), 3), weakref.ref(tensor)

    replay, tensor = recording()
    gc.collect()
    assert tensor() is not None
    assert tensor().tolist() == [5.0] * 4  # once to warm up, three times recorded
    replay()
    assert replayed == [1]
