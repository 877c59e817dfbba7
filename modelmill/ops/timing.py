"""How long a call takes, and how fast the device is at most: the one clock of tuning, benchmarks
and profiles.

On a GPU calls are timed with events, best as replays of a recorded graph, so that the host is not
in the figure; on a CPU by the host's clock. What is compared is timed in turn, round by round, so
that a busy machine slows all alike.
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
# of the square products; large enough that the sides do not matter
MATMUL_SIDE = {"cuda": 8192, "cpu": 1024}
EIGHT_BIT_DTYPES = (torch.int8, torch.float8_e4m3fn)
MIN_MATMUL_SECONDS = 5e-3  # a product that takes this long on a CPU needs not be larger


def capture_graph(call: Call, repeats: int = 1) -> Call:
    """A replay of ``repeats`` calls, recorded in a CUDA graph. Raises RuntimeError where a call
    waits for the host.

    The caller has called it before: what compiles or allocates at first must not happen while
    recording. The replay keeps the call, and with it the tensors at whose addresses the graph
    reads.
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


def time_interleaved(
    calls: Sequence[Call],
    rounds: int,
    calls_per_sample: Sequence[int] | int = 1,
    device: str = "cpu",
) -> list[list[float]]:
    """Seconds of one call of each, ``rounds`` times, the calls one after another in every round.

    calls_per_sample: calls between two readings of the clock, for all or for each.
    """
    counts = (
        [calls_per_sample] * len(calls)
        if isinstance(calls_per_sample, int)
        else list(calls_per_sample)
    )
    timed = _time_with_events if device.startswith("cuda") else _time_on_host
    for call in calls:
        call()
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, seconds in zip(calls, counts, found, strict=True):
            seconds.append(timed(call, count))
    return found


def median_time(call: Call, rounds: int, calls_per_sample: int = 1, device: str = "cpu") -> float:
    """Median seconds of one call."""
    return statistics.median(time_interleaved([call], rounds, calls_per_sample, device)[0])


def calls_for_duration(
    call: Call, min_seconds: float, device: str = "cpu", max_calls: int = 1000
) -> int:
    """How many calls take ``min_seconds`` seconds together: what is shorter than the clock's own
    noise is timed in rows."""
    call()
    once = (_time_with_events if device.startswith("cuda") else _time_on_host)(call, 1)
    return max(1, min(max_calls, int(min_seconds / max(once, 1e-7))))


def copy_bandwidth(device: str = "cuda") -> float:
    """Bytes per second of a copy on the device, bytes read plus bytes written."""
    source = torch.randint(
        0, 1 << 30, (COPY_BYTES[_device_type(device)] // 4,), dtype=torch.int32, device=device
    )
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_time(lambda: target.copy_(source), device)


def memory_read() -> tuple[Call, int]:
    """A read of a large array by all threads of the CPU, and its bytes: what a product with a
    weight can hope for.

    Writing is dearer there than reading, so that a copy would set the mark too low.
    """
    data = torch.ones(COPY_BYTES["cpu"] // 8, dtype=torch.int64)
    library = build.load()
    if isinstance(library, str):  # no compiler
        return data.sum, data.nbytes
    read = library.with_gil.modelmill_read
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return lambda: read(data.data_ptr(), data.nbytes), data.nbytes


def memory_bandwidth(device: str) -> float:
    """Bytes per second that the device's memory gives at most: of a copy on a GPU, of reading on a
    CPU.
    """
    if _device_type(device) == "cuda":
        return copy_bandwidth(device)
    read, size = memory_read()
    return max(size / _best_time(read, device), copy_bandwidth(device))


def square_matmul(device: str, dtype: torch.dtype) -> tuple[Call, int]:
    """A large square matrix product of random values, as torch computes it, and its operations.

    On a CPU it grows from a small one: torch has no fast product for every dtype there.
    """
    most = MATMUL_SIDE[_device_type(device)]
    side = most if _device_type(device) == "cuda" else min(128, most)
    if dtype in EIGHT_BIT_DTYPES:
        return _square_matmul_8bit(device, dtype, side), 2 * side**3
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        if side >= most or time_interleaved([lambda: a @ b], 1)[0][0] > MIN_MATMUL_SECONDS:  # noqa: B023  called at once
            return (lambda: a @ b), 2 * side**3  # noqa: B023  the last pair
        side *= 2


def _square_matmul_8bit(device: str, dtype: torch.dtype, side: int) -> Call:
    """The same in 8 bits: into int32, or with one scale for all into bfloat16."""
    drawn = [
        torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device).to(dtype)
        for _ in range(2)
    ]
    a, b = drawn[0], drawn[1].t()  # the second by columns, as the tensor cores want it
    if dtype is torch.int8:
        return lambda: torch._int_mm(a, b)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def matmul_throughput(device: str, dtype: torch.dtype) -> float | None:
    """Operations per second of such a product; None where torch has none of 8 bits on this
    device.
    """
    try:
        multiply, operations = square_matmul(device, dtype)
        return operations / _best_time(multiply, device)
    except (
        RuntimeError
    ) as error:  # what a device lacks is told so; where memory is short that is another matter
        if dtype not in EIGHT_BIT_DTYPES or isinstance(error, torch.OutOfMemoryError):
            raise
        return None


def _best_time(call: Call, device: str) -> float:
    """A ceiling is the best that was seen; on a GPU, whose readings hardly differ, the median."""
    times = time_interleaved([call], 10, 1, device)[0]
    return statistics.median(times) if device.startswith("cuda") else min(times)


def _device_type(device: str) -> str:
    return torch.device(device).type


def _time_with_events(call: Call, count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def _time_on_host(call: Call, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count
