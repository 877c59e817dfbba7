"""Times every variant of every op against the ceilings of the device, on the op's own cases.

Argument sets that are larger together than the caches take turns, as layers do. On a GPU the calls are replays of a
recorded graph; what cannot be recorded (a reference that reads lengths on the host) is timed call by call with events
and says so. On a CPU the variants, a plain read of the memory and a large product take turns round by round; the
fraction is that of the best round, since on a busy machine only that tells of the kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from modelmill.eval.ceilings import Ceilings
from modelmill.eval.counts import multiplied
from modelmill.eval.op_cases import cases
from modelmill.eval.report import Spread
from modelmill.ops import clock, shelf
from modelmill.ops.case import Case, nbytes

COLD_BYTES = {"cuda": 256 << 20, "cpu": 192 << 20}  # several times the caches
MOST_SETS = {"cuda": 24, "cpu": 256}
ROUNDS, LEAST_ROUNDS = 15, 5
CASE_S = 0.8  # of one case on a CPU, beyond the least rounds
GRAPH_S = 4e-3  # of calls in one graph: enough that its start does not count, little enough to end soon
GRAPH_CALLS = 48
QUEUED = 4  # replays between two events: the start of the first is the only one that the host delays


@dataclass(frozen=True)
class Timed:
    """One variant on one case. us: microseconds a call. tflops: None where the case counts no operations.

    bound: what sets the floor, "memory" or "products". fraction: the floor over the time; None where the case counts no
    bytes. chosen: whether the shelf picks it for this case. how: graph, events or host. failed: why there is no time.
    """

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
class Wanted:
    """What to time: ops (all of the shelf where empty), variants (likewise), cases whose name contains ``case``."""

    ops: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    case: str = ""
    rounds: int | None = None


def bench(ceilings: Ceilings, dtype: torch.dtype, wanted: Wanted) -> Iterator[Timed]:
    """Time what is wanted on the device of the ceilings, op by op."""
    kind = torch.device(ceilings.device).type
    picked = shelf.resolve(ceilings.device).chosen
    for op in (*shelf.OPS, *shelf.SPANS):
        if wanted.ops and op not in wanted.ops:
            continue
        for case in cases(op, kind, dtype):
            if wanted.case in case.name:
                yield from measure(op, case, dtype, ceilings, wanted, picked[op])


def measure(
    op: str, case: Case, dtype: torch.dtype, ceilings: Ceilings, wanted: Wanted, picked: str
) -> Iterator[Timed]:
    """Every wanted variant that serves the case."""
    kind = torch.device(ceilings.device).type
    calls = serving(op, case, kind)
    order = shelf.PREFERENCE[kind]
    chosen = next((each for each in order[order.index(picked) :] if each in calls), "torch")
    name = str(dtype).removeprefix("torch.")
    calls = {v: call for v, call in calls.items() if not wanted.variants or v in wanted.variants}
    rounds = wanted.rounds or ROUNDS
    sets = argument_sets(case, kind)
    timed = _on_cuda(calls, sets, rounds) if kind == "cuda" else _on_cpu(calls, sets, rounds, dtype)
    for variant, times in timed.items():
        base = Timed(op, case.name, name, variant, variant == chosen, times.how)
        if isinstance(times.seconds, str):
            yield replace(base, failed=times.seconds)
            continue
        rate = max(times.products or 0.0, ceilings.products.get(name, 0.0))
        memory = max(times.memory or 0.0, ceilings.memory)
        now = replace(ceilings, memory=memory, products=ceilings.products | {name: rate})
        yield judged(base, case, times.seconds, now)


def judged(base: Timed, case: Case, seconds: Sequence[float], ceilings: Ceilings) -> Timed:
    """The figures of a time. seconds: of single calls."""
    spread = Spread.of([each * 1e6 for each in seconds])
    best = spread.min if base.how == "host" else spread.median
    kind = multiplied(case.args)
    work = (case.bytes_moved, case.flops, base.dtype, {} if kind is None else {kind: case.flops})
    floor = ceilings.floor(*work) * 1e6
    counted = case.bytes_moved > 0
    return replace(
        base,
        us=spread,
        gbps=case.bytes_moved / best / 1e3 if counted else None,
        tflops=case.flops / best / 1e6 if case.flops else None,
        bound=ceilings.bound(*work) if counted else None,
        fraction=floor / best if counted else None,
    )


def serving(op: str, case: Case, kind: str) -> dict[str, Callable[..., Any]]:
    """The reference and every variant that serves these arguments on this kind of device."""
    found = {"torch": shelf.reference(op)}
    for name, module in shelf.variants(op).items():
        supports = getattr(module, "supports", None)
        if module.available(kind) is None and (supports is None or supports(**case.args)):
            found[name] = module.run
    return found


def argument_sets(case: Case, kind: str) -> list[dict[str, Any]]:
    """The case's arguments and as many copies as leave the caches behind."""
    size = nbytes(*(each for each in case.args.values() if isinstance(each, torch.Tensor)))
    count = max(1, min(MOST_SETS[kind], -(-COLD_BYTES[kind] // max(size, 1))))
    copies = [
        {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in case.args.items()}
        for _ in range(count - 1)
    ]
    return [case.args, *copies]


@dataclass(frozen=True)
class _Times:
    """Seconds of single calls, or why there are none. memory, products: the rates of the rounds that they are from."""

    how: str
    seconds: list[float] | str
    memory: float | None = None
    products: float | None = None


def _on_cpu(
    calls: dict[str, Callable[..., Any]], sets: list[dict[str, Any]], rounds: int, dtype: torch.dtype
) -> dict[str, _Times]:
    found: dict[str, _Times] = {}
    ready: dict[str, Callable[[], Any]] = {}
    for name, call in calls.items():
        turns = itertools.cycle(sets)
        try:
            call(**sets[0])
        except Exception as error:  # whatever a kernel may raise: the others are timed all the same
            found[name] = _Times("host", _line(error))
            continue
        ready[name] = lambda call=call, turns=turns: call(**next(turns))  # type: ignore[misc]
    read, size = clock.reading()
    multiply, operations = clock.multiplying("cpu", dtype)
    everything = [*ready.values(), read, multiply]
    queued = [clock.queue_for(call, 1e-4) for call in everything]
    first = sum(sum(times) * each for times, each in zip(clock.in_turn(everything, 1, queued), queued, strict=True))
    rounds = max(LEAST_ROUNDS, min(rounds, int(CASE_S / first)))
    *times, reads, products = clock.in_turn(everything, rounds, queued)
    for name, seconds in zip(ready, times, strict=True):
        found[name] = _Times("host", seconds, size / min(reads), operations / min(products))
    return found


def _on_cuda(calls: dict[str, Callable[..., Any]], sets: list[dict[str, Any]], rounds: int) -> dict[str, _Times]:
    found: dict[str, _Times] = {}
    for name, call in calls.items():
        turns = itertools.cycle(sets)
        step = lambda call=call, turns=turns: call(**next(turns))  # noqa: E731
        try:
            once = clock.median(step, 3, 1, "cuda")
        except Exception as error:  # as on a CPU
            found[name] = _Times("events", _line(error))
            continue
        repeats = len(sets) * max(1, min(GRAPH_CALLS // len(sets), int(GRAPH_S / (once * len(sets)))))
        try:
            replay = clock.recorded(step, repeats)
        except RuntimeError:  # it waits for the host, which a recording refuses
            torch.cuda.synchronize()
            found[name] = _Times("events", clock.in_turn([step], 3, 1, "cuda")[0])
            continue
        seconds = clock.in_turn([replay], rounds, QUEUED, "cuda")[0]
        found[name] = _Times("graph", [each / repeats for each in seconds])
    return found


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
