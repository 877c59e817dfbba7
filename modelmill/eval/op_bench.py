"""Time every implementation of every op against the device's roofline, on the op's own cases.

The calls cycle through argument sets that together exceed the caches, as the layers of a model do.
On a GPU the calls are replays of a CUDA graph; a call that cannot be captured (a reference that
reads lengths on the host) is timed alone with CUDA events, and ``how`` is then "events". On a CPU
the implementations, a plain memory read and a large matrix product are interleaved round by round;
the fraction is of the best round, because other load of the machine slows the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from modelmill.eval.op_cases import bench_cases
from modelmill.eval.report import BenchResult, MeasurementStats
from modelmill.eval.roofline import RooflineCeilings
from modelmill.ops import registry, timing
from modelmill.ops.case import Case, nbytes
from modelmill.ops.op_cost import act_8bit_dtype_name

CACHE_FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 192 << 20}  # several times the caches
MAX_ARGUMENT_SETS = {"cuda": 24, "cpu": 256}
TIMING_ROUNDS, MIN_TIMING_ROUNDS = 15, 5
CPU_CASE_SECONDS = 0.8  # per case on a CPU, but at least MIN_TIMING_ROUNDS rounds
# duration of one graph: long beside its launch, short enough for many rounds
TARGET_GRAPH_SECONDS = 4e-3
MAX_CALLS_PER_GRAPH = 48
# replays between two events: the host delays only the launch of the first
REPLAYS_PER_SAMPLE = 4


@dataclass(frozen=True)
class OpTiming(BenchResult):
    """Time of one implementation (``variant``) on one case.

    us: microseconds per call. tflops: None if the case counts no operations. bound: what limits the
    roofline, "memory" or "products". fraction: roofline time over measured time; None if the case
    counts no bytes. chosen: whether the engine selects this implementation for the case. how:
    "graph", "events" or "host". failed: error message if there is no time.
    """

    op: str
    case: str
    dtype: str
    variant: str
    chosen: bool
    how: str
    us: MeasurementStats | None = None
    gbps: float | None = None
    tflops: float | None = None
    bound: str | None = None
    fraction: float | None = None
    failed: str | None = None


@dataclass(frozen=True)
class OpBenchSelection:
    """What to time: ops and implementations (empty: all), cases whose name contains ``case``."""

    ops: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    case: str = ""
    rounds: int | None = None


def bench_ops(
    roofline: RooflineCeilings, dtype: torch.dtype, selection: OpBenchSelection
) -> Iterator[OpTiming]:
    """Time the selected ops on the roofline's device, op by op."""
    device_type = torch.device(roofline.device).type
    backends = registry.select_backends(roofline.device).backends
    for op in registry.op_names():
        if selection.ops and op not in selection.ops:
            continue
        for case in bench_cases(op, device_type, dtype):
            if selection.case in case.name:
                yield from time_case(op, case, dtype, roofline, selection, backends[op])


def time_case(
    op: str,
    case: Case,
    dtype: torch.dtype,
    roofline: RooflineCeilings,
    selection: OpBenchSelection,
    backend: str,
) -> Iterator[OpTiming]:
    """Time every selected implementation that supports the case."""
    device_type = torch.device(roofline.device).type
    calls = runnable_implementations(op, case, device_type)
    order = registry.BACKEND_PREFERENCE[device_type]
    chosen = next((each for each in order[order.index(backend) :] if each in calls), "torch")
    name = str(dtype).removeprefix("torch.")
    calls = {
        variant: call
        for variant, call in calls.items()
        if not selection.implementations or variant in selection.implementations
    }
    rounds = selection.rounds or TIMING_ROUNDS
    declaration = registry.op_declarations()[op]
    sets = [declaration.pack_named_inputs(each) for each in make_argument_sets(case, device_type)]
    timed = (
        _time_on_cuda(calls, sets, rounds)
        if device_type == "cuda"
        else _time_on_cpu(calls, sets, rounds, dtype)
    )
    for variant, times in timed.items():
        base = OpTiming(op, case.name, name, variant, variant == chosen, times.how)
        if isinstance(times.seconds, str):
            yield replace(base, failed=times.seconds)
            continue
        rate = max(times.matmul_rates or 0.0, roofline.matmul_rates.get(name, 0.0))
        bandwidth = max(times.memory_bandwidth or 0.0, roofline.memory_bandwidth)
        measured_roofline = replace(
            roofline, memory_bandwidth=bandwidth, matmul_rates=roofline.matmul_rates | {name: rate}
        )
        yield with_time_and_roofline(base, case, times.seconds, measured_roofline)


def with_time_and_roofline(
    base: OpTiming, case: Case, seconds: Sequence[float], roofline: RooflineCeilings
) -> OpTiming:
    """Fill in the figures of a timing from the seconds of single calls."""
    spread = MeasurementStats.from_values([each * 1e6 for each in seconds])
    best = spread.min if base.how == "host" else spread.median
    act_dtype = act_8bit_dtype_name(case.args)
    work = (
        case.bytes_moved,
        case.flops,
        base.dtype,
        {} if act_dtype is None else {act_dtype: case.flops},
    )
    floor = roofline.min_seconds(*work) * 1e6
    counted = case.bytes_moved > 0
    return replace(
        base,
        us=spread,
        gbps=case.bytes_moved / best / 1e3 if counted else None,
        tflops=case.flops / best / 1e6 if case.flops else None,
        bound=roofline.limiting_resource(*work) if counted else None,
        fraction=floor / best if counted else None,
    )


def runnable_implementations(
    op: str, case: Case, device_type: str
) -> dict[str, Callable[..., Any]]:
    """Return the reference and every implementation that supports these arguments."""
    runnable = {"torch": registry.reference(op)}
    for name, module in registry.implementations(op).items():
        if module.unavailable_reason(device_type) is None and registry.backend_serves_args(
            op, name, **case.args
        ):
            runnable[name] = module.run
    return runnable


def make_argument_sets(case: Case, device_type: str) -> list[dict[str, Any]]:
    """Return the case's arguments and enough copies to exceed the caches."""
    size = nbytes(*(each for each in case.args.values() if isinstance(each, torch.Tensor)))
    count = max(
        1, min(MAX_ARGUMENT_SETS[device_type], -(-CACHE_FLUSH_BYTES[device_type] // max(size, 1)))
    )
    copies = [
        {
            name: each.clone() if isinstance(each, torch.Tensor) else each
            for name, each in case.args.items()
        }
        for _ in range(count - 1)
    ]
    return [case.args, *copies]


@dataclass(frozen=True)
class _CallTimes:
    """Seconds of single calls, or an error message.

    memory_bandwidth, matmul_rates: the rates measured in the same rounds.
    """

    how: str
    seconds: list[float] | str
    memory_bandwidth: float | None = None
    matmul_rates: float | None = None


def _time_on_cpu(
    calls: dict[str, Callable[..., Any]],
    sets: list[dict[str, Any]],
    rounds: int,
    dtype: torch.dtype,
) -> dict[str, _CallTimes]:
    results: dict[str, _CallTimes] = {}
    ready: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        arg_cycle = itertools.cycle(sets)
        try:
            call(**sets[0])
        except Exception as error:  # any error: still time the others
            results[name] = _CallTimes("host", _one_line_error(error))
            continue
        ready[name] = lambda call=call, arg_cycle=arg_cycle: call(**next(arg_cycle))  # type: ignore[misc]
    read, size = timing.make_cpu_memory_read_with_bytes()
    multiply, operations = timing.make_square_matmul_with_op_count("cpu", dtype)
    all_calls = [*ready.values(), read, multiply]
    repeats = [timing.count_calls_for_duration(call, 1e-4) for call in all_calls]
    round_seconds = sum(
        sum(times) * each
        for times, each in zip(timing.time_interleaved(all_calls, 1, repeats), repeats, strict=True)
    )
    rounds = max(MIN_TIMING_ROUNDS, min(rounds, int(CPU_CASE_SECONDS / round_seconds)))
    *times, reads, products = timing.time_interleaved(all_calls, rounds, repeats)
    for name, seconds in zip(ready, times, strict=True):
        results[name] = _CallTimes("host", seconds, size / min(reads), operations / min(products))
    return results


def _time_on_cuda(
    calls: dict[str, Callable[..., Any]], sets: list[dict[str, Any]], rounds: int
) -> dict[str, _CallTimes]:
    results: dict[str, _CallTimes] = {}
    for name, call in calls.items():
        arg_cycle = itertools.cycle(sets)
        step = lambda call=call, arg_cycle=arg_cycle: call(**next(arg_cycle))  # noqa: E731
        try:
            once = timing.median_time(step, 3, 1, "cuda")
        except Exception as error:  # as on a CPU
            results[name] = _CallTimes("events", _one_line_error(error))
            continue
        repeats = len(sets) * max(
            1, min(MAX_CALLS_PER_GRAPH // len(sets), int(TARGET_GRAPH_SECONDS / (once * len(sets))))
        )
        try:
            replay = timing.capture_graph(step, repeats)
        except RuntimeError:  # it synchronizes with the host, which capture forbids
            torch.cuda.synchronize()
            results[name] = _CallTimes("events", timing.time_interleaved([step], 3, 1, "cuda")[0])
            continue
        seconds = timing.time_interleaved([replay], rounds, REPLAYS_PER_SAMPLE, "cuda")[0]
        results[name] = _CallTimes("graph", [each / repeats for each in seconds])
    return results


def _one_line_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
