"""Times every variant of every op on the GPU against what the memory gives.

    python benchmarks/ops.py [--op linear --op rms_norm] [--dtype bfloat16] [--variant triton] [--out FILE.jsonl]

One JSON line per op, case, dtype and variant: median microseconds a call, GB/s over the least traffic of the case,
the fraction of a device copy measured in the same run, TFLOP/s where the case counts operations. Calls are captured
in a CUDA graph that rotates among input sets larger together than the L2 cache; what cannot be captured (a reference
that reads lengths on the host) is timed call by call with events and says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from modelmill.ops import shelf  # noqa: E402
from modelmill.ops.case import Case, nbytes, randn  # noqa: E402
from modelmill.ops.paged_attention import _case as attention_case  # noqa: E402

COLD_BYTES = 256 << 20  # several times the 60 MB L2 of an H200
MOST_SETS = 24
REPLAYS = 15
QUEUED = 4  # replays between two events: the start of the first is the only one that the host delays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--op", action="append", choices=shelf.OPS)
    parser.add_argument("--dtype", action="append", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--variant", action="append", choices=("torch", *shelf.SHELVES))
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, help="append the lines to this file as well")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/ops.py needs a CUDA GPU; torch sees none")
    stamp = _stamp() | {"ceiling_gbps": round(_copy_rate())}
    for op in options.op or shelf.OPS:
        for name in options.dtype or ("bfloat16",):
            dtype = getattr(torch, name)
            for case in _cases(op, dtype):
                if options.case is None or options.case in case.name:
                    for row in _rows(op, case, options.variant, stamp["ceiling_gbps"]):
                        line = json.dumps({"bench": "op", "op": op, "dtype": name, "case": case.name} | row | stamp)
                        print(line, flush=True)
                        if options.out is not None:
                            with options.out.open("a") as file:
                                file.write(line + "\n")


def _stamp() -> dict[str, Any]:
    versions = {"torch": torch.__version__}
    try:
        versions["triton"] = import_module("triton").__version__
    except ImportError:
        versions["triton"] = "absent"
    return {
        "command": "python benchmarks/ops.py " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    } | versions


def _copy_rate() -> float:
    """GB/s of a 2 GiB device-to-device copy, bytes read plus bytes written."""
    source = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * nbytes(source) / _by_events(lambda _: target.copy_(source), 1, 20) / 1e3


def _cases(op: str, dtype: torch.dtype) -> Iterator[Case]:
    """The op's own cases and the shapes that the speed targets name."""
    yield from import_module(f"modelmill.ops.{op}").cases("cuda", dtype)
    yield from EXTRA.get(op, lambda _: iter(()))(dtype)


def _norms(dtype: torch.dtype) -> Iterator[Case]:
    x = randn(16384, 4096, device="cuda", dtype=dtype, seed=1)
    weight = randn(4096, device="cuda", dtype=dtype, seed=2) + 1
    yield Case("16384x4096", {"x": x, "weight": weight, "eps": 1e-5}, 2 * nbytes(x))


def _add_norms(dtype: torch.dtype) -> Iterator[Case]:
    for case in _norms(dtype):
        residual = randn(16384, 4096, device="cuda", dtype=dtype, seed=3)
        yield Case(case.name, case.args | {"residual": residual}, 2 * case.bytes_moved, writes=("residual",))


def _linears(dtype: torch.dtype) -> Iterator[Case]:
    for rows, k, n in ((1, 4096, 151936), (2, 4096, 12288), (8, 4096, 12288), (8, 11008, 4096), (16, 4096, 22016)):
        x = randn(rows, k, device="cuda", dtype=dtype, seed=rows)
        weight = randn(n, k, device="cuda", dtype=dtype, seed=k, scale=k**-0.5)
        moved = nbytes(x, weight) + rows * n * x.element_size()
        yield Case(f"{rows}x{k}->{n}", {"x": x, "weight": weight, "bias": None}, moved, 2 * rows * k * n)


def _int8_linears(dtype: torch.dtype) -> Iterator[Case]:
    from modelmill.ops.int8_linear import quantize

    for rows, k, n in ((16, 4096, 12288), (64, 4096, 12288), (256, 4096, 12288), (512, 4096, 12288)):
        x = randn(rows, k, device="cuda", dtype=dtype, seed=rows)
        weight, scale = quantize(randn(n, k, device="cuda", dtype=torch.float32, seed=k, scale=k**-0.5))
        moved = nbytes(x, weight) + rows * n * x.element_size()
        args = {"x": x, "weight": weight, "scale": scale, "bias": None}
        yield Case(f"{rows}x{k}->{n}", args, moved, 2 * rows * k * n)


def _attentions(dtype: torch.dtype) -> Iterator[Case]:
    shapes = (
        ("decode-8-1024", 32, 32, [(1, 1024)] * 8),
        ("decode-64-128", 32, 32, [(1, 128)] * 64),
        ("decode-gqa-1-4096", 32, 8, [(1, 4096)]),
        ("decode-gqa-64-1024", 32, 8, [(1, 1024)] * 64),
        ("prefill-1024", 32, 32, [(1024, 1024)]),
        ("prefill-4096", 32, 32, [(4096, 4096)]),
        ("prefill-chunk-1024-of-4096", 32, 32, [(1024, 4096)]),
    )
    for number, (name, heads, kv_heads, lengths) in enumerate(shapes):
        yield attention_case(name, heads, kv_heads, 128, lengths, None, "cuda", dtype, number)


EXTRA: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "rms_norm": _norms,
    "add_rms_norm": _add_norms,
    "linear": _linears,
    "int8_linear": _int8_linears,
    "paged_attention": _attentions,
}


def _rows(op: str, case: Case, wanted: list[str] | None, ceiling: float) -> Iterator[dict[str, Any]]:
    """A timed row for the reference and for each variant that serves this case."""
    callables: dict[str, Callable[..., Any]] = {"torch": shelf.reference(op)}
    for name, module in shelf.variants(op).items():
        supports = getattr(module, "supports", None)
        if module.available("cuda") is None and (supports is None or supports(**case.args)):
            callables[name] = module.run
    for name, call in callables.items():
        if wanted is None or name in wanted:
            micros, how = _time(call, case)
            row = {"variant": name, "us": round(micros, 2), "unit": "us", "timed": how}
            rate = case.bytes_moved / micros / 1e3
            row |= {"gbps": round(rate, 1), "fraction": round(rate / ceiling, 3)}
            if case.flops:
                row["tflops"] = round(case.flops / micros / 1e6, 1)
            yield row


def _time(call: Callable[..., Any], case: Case) -> tuple[float, str]:
    """(median microseconds a call, how it was timed)."""
    size = nbytes(*(a for a in case.args.values() if isinstance(a, torch.Tensor)))
    count = max(1, min(MOST_SETS, -(-COLD_BYTES // max(size, 1))))
    sets = [case.args] + [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in case.args.items()} for _ in range(count - 1)
    ]

    def step(i: int) -> None:
        call(**sets[i % count])

    step(0)
    torch.cuda.synchronize()
    try:
        return _by_graph(step, count), "graph"
    except RuntimeError:  # the reference reads lengths on the host, which a capture refuses
        torch.cuda.synchronize()
        return _by_events(step, count, 3), "events"


def _by_graph(step: Callable[[int], Any], sets: int) -> float:
    calls = sets * -(-48 // sets)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            step(i)
    graph.replay()

    def replay(_: int) -> None:
        for _ in range(QUEUED):
            graph.replay()

    return _by_events(replay, 1, REPLAYS) / (calls * QUEUED)


def _by_events(step: Callable[[int], Any], sets: int, repeats: int) -> float:
    """Median microseconds of a call of ``step``."""
    step(0)
    times = []
    for i in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step(i % sets)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
