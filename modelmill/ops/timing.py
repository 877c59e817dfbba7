"""Timing of calls and of the device's limits, used by autotuning, benchmarks and profiles.

On a GPU calls are timed with CUDA events, preferably as replays of a captured graph, so that host
time is not included. On a CPU the host's clock is used. Calls that are compared are timed
alternately, round by round, so that other load slows all of them equally.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cuda_graph import GraphCapturer, run_on_side_stream

TimedCall = Callable[[], Any]
BANDWIDTH_COPY_BYTES = {
    "cuda": 1 << 30,
    "cpu": 128 << 20,
}  # much larger than the caches; read and written
# side of the square matrices; large enough that edge effects do not matter
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
EIGHT_BIT_DTYPES = (torch.int8, torch.float8_e4m3fn)
MIN_MATMUL_SECONDS = 5e-3  # on a CPU the matrices grow until a product takes this long


def capture_graph(call: TimedCall, repeats: int = 1) -> TimedCall:
    """Capture ``repeats`` calls in a CUDA graph and return its replay.

    The caller must have called ``call`` before: compilation and first allocations must not happen
    during capture. The replay keeps a reference to ``call``, and so to the tensors whose addresses
    are in the graph.

    Raises:
        RuntimeError: if a call synchronizes with the host.
    """
    stream = torch.cuda.Stream()
    with run_on_side_stream(stream):
        call()
    torch.cuda.synchronize()

    def repeat() -> None:
        for _ in range(repeats):
            call()

    graph = GraphCapturer(shared_pool=False).capture(repeat, stream)

    def replay(_keep_alive: TimedCall = call) -> None:
        graph.replay()

    return replay


def time_interleaved(
    calls: Sequence[TimedCall],
    rounds: int,
    calls_per_sample: Sequence[int] | int = 1,
    device: str = "cpu",
) -> list[list[float]]:
    """Time calls alternately: in every round, one sample of each call.

    Args:
        calls: each is called once before timing.
        rounds: samples per call.
        calls_per_sample: calls between two clock readings, one number for all or one per call.
        device: "cpu" or a CUDA device.

    Returns:
        For each call, seconds per call in each round.
    """
    counts = (
        [calls_per_sample] * len(calls)
        if isinstance(calls_per_sample, int)
        else list(calls_per_sample)
    )
    time_sample = _time_with_events if device.startswith("cuda") else _time_on_host
    for call in calls:
        call()
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, seconds in zip(calls, counts, samples, strict=True):
            seconds.append(time_sample(call, count))
    return samples


def median_time(
    call: TimedCall, rounds: int, calls_per_sample: int = 1, device: str = "cpu"
) -> float:
    """Median seconds of one call."""
    return statistics.median(time_interleaved([call], rounds, calls_per_sample, device)[0])


def count_calls_for_duration(call: TimedCall, min_seconds: float, max_calls: int = 1000) -> int:
    """Number of calls that together take about ``min_seconds``, at most ``max_calls``.

    Short calls are timed in such series, because a single one is below the clock's noise.
    """
    call()
    return max(1, min(max_calls, int(min_seconds / max(_time_on_host(call, 1), 1e-7))))


def copy_bandwidth(device: str = "cuda") -> float:
    """Bytes per second of a copy on the device, bytes read plus bytes written."""
    source = torch.randint(
        0,
        1 << 30,
        (BANDWIDTH_COPY_BYTES[_device_type(device)] // 4,),
        dtype=torch.int32,
        device=device,
    )
    target = torch.empty_like(source)
    return 2 * source.nbytes / _min_or_median_time(lambda: target.copy_(source), device)


def make_cpu_memory_read_with_bytes() -> tuple[TimedCall, int]:
    """A read of a large array by all CPU threads, and its size in bytes.

    This is the upper limit for a product with a weight. Writing is slower than reading, so a copy
    would give too low a limit.
    """
    data = torch.ones(BANDWIDTH_COPY_BYTES["cpu"] // 8, dtype=torch.int64)
    library = build.load_or_compile_library()
    if isinstance(library, str):  # no compiler
        return data.sum, data.nbytes
    read = library.with_gil.modelmill_read
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return lambda: read(data.data_ptr(), data.nbytes), data.nbytes


def measure_memory_bandwidth(device: str) -> float:
    """Peak bytes per second of the device's memory: copy; on a CPU the faster of read and copy."""
    if _device_type(device) == "cuda":
        return copy_bandwidth(device)
    read, size = make_cpu_memory_read_with_bytes()
    return max(size / _min_or_median_time(read, device), copy_bandwidth(device))


def make_square_matmul_with_op_count(device: str, dtype: torch.dtype) -> tuple[TimedCall, int]:
    """A large square matrix product of random values in torch, and its number of operations.

    On a CPU the size starts small and grows, because torch has no fast product there for some
    dtypes.
    """
    max_side = MATMUL_SIZE[_device_type(device)]
    side = max_side if _device_type(device) == "cuda" else min(128, max_side)
    if dtype in EIGHT_BIT_DTYPES:
        return _square_matmul_8bit(device, dtype, side), 2 * side**3
    while True:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        if side >= max_side or time_interleaved([lambda: a @ b], 1)[0][0] > MIN_MATMUL_SECONDS:  # noqa: B023  called immediately
            return (lambda: a @ b), 2 * side**3  # noqa: B023  binds the last pair
        side *= 2


def _square_matmul_8bit(device: str, dtype: torch.dtype, side: int) -> TimedCall:
    """The same in 8 bits: int8 to int32, or fp8 with one scale to bfloat16."""
    matrices = [
        torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device).to(dtype)
        for _ in range(2)
    ]
    # the 8-bit tensor-core product requires a column-major second matrix
    a, b = matrices[0], matrices[1].t()
    if dtype is torch.int8:
        return lambda: torch._int_mm(a, b)
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def matmul_throughput(device: str, dtype: torch.dtype) -> float | None:
    """Operations per second of a large square matrix product.

    Returns:
        None where torch has no 8-bit product on this device.
    """
    try:
        multiply, operations = make_square_matmul_with_op_count(device, dtype)
        return operations / _min_or_median_time(multiply, device)
    except RuntimeError as error:  # unsupported dtype; running out of memory is raised
        if dtype not in EIGHT_BIT_DTYPES or isinstance(error, torch.OutOfMemoryError):
            raise
        return None


def _min_or_median_time(call: TimedCall, device: str) -> float:
    """The minimum of ten samples; the median on a GPU, whose samples hardly vary."""
    times = time_interleaved([call], 10, 1, device)[0]
    return statistics.median(times) if device.startswith("cuda") else min(times)


def _device_type(device: str) -> str:
    return torch.device(device).type


def _time_with_events(call: TimedCall, count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def _time_on_host(call: TimedCall, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
