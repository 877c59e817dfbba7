"""How long a call takes, and how fast the device is at most: the one clock of tuning, benchmarks and profiles.

On a GPU calls are timed with events, best as replays of a recorded graph, so that the host is not in the figure; on a
CPU by the host's clock. What is compared is timed in turn, round by round, so that a busy machine slows all alike.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from modelmill.ops.cpu import build

Call = Callable[[], Any]
COPY_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}  # many times the caches, read and written
SIDE = {"cuda": 8192, "cpu": 1024}  # of the square products; large enough that the sides do not matter
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
ENOUGH_S = 5e-3  # a product that takes this long on a CPU needs not be larger


def recorded(call: Call, repeats: int = 1) -> Call:
    """A replay of ``repeats`` calls, recorded in a CUDA graph. Raises RuntimeError where a call waits for the host.

    The caller has called it before: what compiles or allocates at first must not happen while recording. The replay
    keeps the call, and with it the tensors at whose addresses the graph reads.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(repeats):
            call()

    def replay(_kept: Call = call) -> None:
        graph.replay()

    return replay


def in_turn(
    calls: Sequence[Call], rounds: int, queued: Sequence[int] | int = 1, device: str = "cpu"
) -> list[list[float]]:
    """Seconds of one call of each, ``rounds`` times, the calls one after another in every round.

    queued: calls between two readings of the clock, for all or for each.
    """
    counts = [queued] * len(calls) if isinstance(queued, int) else list(queued)
    timed = _by_events if device.startswith("cuda") else _by_host
    for call in calls:
        call()
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, seconds in zip(calls, counts, found, strict=True):
            seconds.append(timed(call, count))
    return found


def median(call: Call, rounds: int, queued: int = 1, device: str = "cpu") -> float:
    """Median seconds of one call."""
    return statistics.median(in_turn([call], rounds, queued, device)[0])


def queue_for(call: Call, least: float, device: str = "cpu", most: int = 1000) -> int:
    """How many calls take ``least`` seconds together: what is shorter than the clock's own noise is timed in rows."""
    call()
    once = (_by_events if device.startswith("cuda") else _by_host)(call, 1)
    return max(1, min(most, int(least / max(once, 1e-7))))


def copy_rate(device: str = "cuda") -> float:
    """Bytes per second of a copy on the device, bytes read plus bytes written."""
    source = torch.randint(0, 1 << 30, (COPY_BYTES[_kind(device)] // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device)


def reading() -> tuple[Call, int]:
    """A read of a large array by all threads of the CPU, and its bytes: what a product with a weight can hope for.

    Writing is dearer there than reading, so that a copy would set the mark too low.
    """
    data = torch.ones(COPY_BYTES["cpu"] // 8, dtype=torch.int64)
    library = build.load()
    if isinstance(library, str):  # no compiler
        return data.sum, data.nbytes
    read = library.quick.modelmill_read
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return lambda: read(data.data_ptr(), data.nbytes), data.nbytes


def memory_rate(device: str) -> float:
    """Bytes per second that the device's memory gives at most: of a copy on a GPU, of reading on a CPU."""
    if _kind(device) == "cuda":
        return copy_rate(device)
    read, size = reading()
    return max(size / _best(read, device), copy_rate(device))


def multiplying(device: str, dtype: torch.dtype) -> tuple[Call, int]:
    """A large square matrix product of random values, as torch computes it, and its operations.

    On a CPU it grows from a small one: torch has no fast product for every dtype there.
    """
    most = SIDE[_kind(device)]
    side = most if _kind(device) == "cuda" else min(128, most)
    if dtype in EIGHT_BITS:
        return _multiplying_8_bits(device, dtype, side), 2 * side**3
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        if side >= most or in_turn([lambda: a @ b], 1)[0][0] > ENOUGH_S:  # noqa: B023  called at once
            return (lambda: a @ b), 2 * side**3  # noqa: B023  the last pair
        side *= 2


def _multiplying_8_bits(device: str, dtype: torch.dtype, side: int) -> Call:
    """The same in 8 bits: into int32, or with one scale for all into bfloat16."""
    drawn = [torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device).to(dtype) for _ in range(2)]
    a, b = drawn[0], drawn[1].t()  # the second by columns, as the tensor cores want it
    if dtype is torch.int8:
        return lambda: torch._int_mm(a, b)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def product_rate(device: str, dtype: torch.dtype) -> float | None:
    """Operations per second of such a product; None where torch has none of 8 bits on this device."""
    try:
        multiply, operations = multiplying(device, dtype)
        return operations / _best(multiply, device)
    except RuntimeError as error:  # what a device lacks is told so; where memory is short that is another matter
        if dtype not in EIGHT_BITS or isinstance(error, torch.OutOfMemoryError):
            raise
        return None


def _best(call: Call, device: str) -> float:
    """A ceiling is the best that was seen; on a GPU, whose readings hardly differ, the median."""
    times = in_turn([call], 10, 1, device)[0]
    return statistics.median(times) if device.startswith("cuda") else min(times)


def _kind(device: str) -> str:
    return torch.device(device).type


def _by_events(call: Call, count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def _by_host(call: Call, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count
