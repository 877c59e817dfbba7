"""Times every variant of every op against the ceilings of the device, on the op's own cases.

Argument sets that are larger together than the caches take turns, as layers do. On a GPU the calls
are replays of a recorded graph; what cannot be recorded (a reference that reads lengths on the
host) is timed call by call with events and says so. On a CPU the variants, a plain read of the
memory and a large product take turns round by round; the fraction is that of the best round, since
on a busy machine only that tells of the kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from modelmill.eval.op_cases import bench_cases
from modelmill.eval.op_cost import act_8bit_dtype
from modelmill.eval.report import Spread
from modelmill.eval.roofline import Roofline
from modelmill.ops import registry, timing
from modelmill.ops.case import Case, nbytes

CACHE_FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 192 << 20}  # several times the caches
MAX_ARGUMENT_SETS = {"cuda": 24, "cpu": 256}
ROUNDS, MIN_ROUNDS = 15, 5
CASE_SECONDS = 0.8  # of one case on a CPU, beyond the least rounds
# of calls in one graph: enough that its start does not count, little enough to end soon
GRAPH_SECONDS = 4e-3
GRAPH_CALLS = 48
# replays between two events: the start of the first is the only one that the host delays
QUEUED_CALLS = 4


@dataclass(frozen=True)
class OpTiming:
    """One variant on one case. us: microseconds a call. tflops: None where the case counts no
    operations.

    bound: what sets the floor, "memory" or "products". fraction: the floor over the time; None
    where the case counts no bytes. chosen: whether the engine picks it for this case. how: graph,
    events or host. failed: why there is no time."""

    op: str
    case: str
    dtype: str
    variant: str
    chosen: bool
    how: str
    us: Spread | None = None
    gbps: float | None = None
    tflops: float | None = None
    bound: str | None = None
    fraction: float | None = None
    failed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class OpBenchSelection:
    """What to time: ops (all where empty), variants (likewise), cases whose name contains
    ``case``.
    """

    ops: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    case: str = ""
    rounds: int | None = None


def bench_ops(
    roofline: Roofline, dtype: torch.dtype, selection: OpBenchSelection
) -> Iterator[OpTiming]:
    """Time what is wanted on the device of the ceilings, op by op."""
    kind = torch.device(roofline.device).type
    picked = registry.select_backends(roofline.device).backends
    for op in (*registry.OPS, *registry.FUSED_OPS):
        if selection.ops and op not in selection.ops:
            continue
        for case in bench_cases(op, kind, dtype):
            if selection.case in case.name:
                yield from measure_case(op, case, dtype, roofline, selection, picked[op])


def measure_case(
    op: str,
    case: Case,
    dtype: torch.dtype,
    roofline: Roofline,
    selection: OpBenchSelection,
    picked: str,
) -> Iterator[OpTiming]:
    """Every wanted variant that serves the case."""
    kind = torch.device(roofline.device).type
    calls = runnable_implementations(op, case, kind)
    order = registry.BACKEND_PREFERENCE[kind]
    chosen = next((each for each in order[order.index(picked) :] if each in calls), "torch")
    name = str(dtype).removeprefix("torch.")
    calls = {
        v: call
        for v, call in calls.items()
        if not selection.implementations or v in selection.implementations
    }
    rounds = selection.rounds or ROUNDS
    sets = argument_sets(case, kind)
    timed = (
        _time_on_cuda(calls, sets, rounds)
        if kind == "cuda"
        else _time_on_cpu(calls, sets, rounds, dtype)
    )
    for variant, times in timed.items():
        base = OpTiming(op, case.name, name, variant, variant == chosen, times.how)
        if isinstance(times.seconds, str):
            yield replace(base, failed=times.seconds)
            continue
        rate = max(times.matmul_rates or 0.0, roofline.matmul_rates.get(name, 0.0))
        bandwidth = max(times.memory_bandwidth or 0.0, roofline.memory_bandwidth)
        now = replace(
            roofline, memory_bandwidth=bandwidth, matmul_rates=roofline.matmul_rates | {name: rate}
        )
        yield with_roofline(base, case, times.seconds, now)


def with_roofline(
    base: OpTiming, case: Case, seconds: Sequence[float], roofline: Roofline
) -> OpTiming:
    """The figures of a time. seconds: of single calls."""
    spread = Spread.from_values([each * 1e6 for each in seconds])
    best = spread.min if base.how == "host" else spread.median
    kind = act_8bit_dtype(case.args)
    work = (case.bytes_moved, case.flops, base.dtype, {} if kind is None else {kind: case.flops})
    floor = roofline.min_seconds(*work) * 1e6
    counted = case.bytes_moved > 0
    return replace(
        base,
        us=spread,
        gbps=case.bytes_moved / best / 1e3 if counted else None,
        tflops=case.flops / best / 1e6 if case.flops else None,
        bound=roofline.bound(*work) if counted else None,
        fraction=floor / best if counted else None,
    )


def runnable_implementations(
    op: str, case: Case, device_type: str
) -> dict[str, Callable[..., Any]]:
    """The reference and every variant that serves these arguments on this kind of device."""
    found = {"torch": registry.reference(op)}
    for name, module in registry.implementations(op).items():
        supports = getattr(module, "supports", None)
        if module.available(device_type) is None and (supports is None or supports(**case.args)):
            found[name] = module.run
    return found


def argument_sets(case: Case, device_type: str) -> list[dict[str, Any]]:
    """The case's arguments and as many copies as leave the caches behind."""
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
    """Seconds of single calls, or why there are none. memory_bandwidth, matmul_rates: the rates of
    the rounds that they are from."""

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
    found: dict[str, _CallTimes] = {}
    ready: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        turns = itertools.cycle(sets)
        try:
            call(**sets[0])
        except Exception as error:  # whatever a kernel may raise: the others are timed all the same
            found[name] = _CallTimes("host", _one_line(error))
            continue
        ready[name] = lambda call=call, turns=turns: call(**next(turns))  # type: ignore[misc]
    read, size = timing.memory_read()
    multiply, operations = timing.square_matmul("cpu", dtype)
    everything = [*ready.values(), read, multiply]
    queued = [timing.calls_for_duration(call, 1e-4) for call in everything]
    first = sum(
        sum(times) * each
        for times, each in zip(timing.time_interleaved(everything, 1, queued), queued, strict=True)
    )
    rounds = max(MIN_ROUNDS, min(rounds, int(CASE_SECONDS / first)))
    *times, reads, products = timing.time_interleaved(everything, rounds, queued)
    for name, seconds in zip(ready, times, strict=True):
        found[name] = _CallTimes("host", seconds, size / min(reads), operations / min(products))
    return found


def _time_on_cuda(
    calls: dict[str, Callable[..., Any]], sets: list[dict[str, Any]], rounds: int
) -> dict[str, _CallTimes]:
    found: dict[str, _CallTimes] = {}
    for name, call in calls.items():
        turns = itertools.cycle(sets)
        step = lambda call=call, turns=turns: call(**next(turns))  # noqa: E731
        try:
            once = timing.median_time(step, 3, 1, "cuda")
        except Exception as error:  # as on a CPU
            found[name] = _CallTimes("events", _one_line(error))
            continue
        repeats = len(sets) * max(
            1, min(GRAPH_CALLS // len(sets), int(GRAPH_SECONDS / (once * len(sets))))
        )
        try:
            replay = timing.capture_graph(step, repeats)
        except RuntimeError:  # it waits for the host, which a recording refuses
            torch.cuda.synchronize()
            found[name] = _CallTimes("events", timing.time_interleaved([step], 3, 1, "cuda")[0])
            continue
        seconds = timing.time_interleaved([replay], rounds, QUEUED_CALLS, "cuda")[0]
        found[name] = _CallTimes("graph", [each / repeats for each in seconds])
    return found


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
