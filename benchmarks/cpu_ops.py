"""The CPU kernels against torch's reference on SmolLM2-135M's shapes, and against the memory's read bandwidth.

    python benchmarks/cpu_ops.py [--threads 2] [--rows 1,16] [--ops linear,int8_linear] [--rounds 25]

Ours and torch's are timed in turn within each round, so that a busy machine slows both alike; medians are compared,
and the best of the rounds stands beside them, since on a busy machine only that tells of the kernel. Weights take turns
over enough copies to leave the caches, as the layers of a model do. Prints a table, and appends one JSON line per row
to benchmarks/results/cpu.jsonl.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import itertools
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from modelmill.ops.cpu import build
from modelmill.ops.int8_linear import quantize

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 576, 1536, 9, 3, 64, 49152
LINEARS = {
    "qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * DIM),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (HIDDEN, 2 * INNER),
    "down": (INNER, HIDDEN),
    "head": (HIDDEN, VOCAB),
}
COLD_BYTES = 192 << 20
RESULTS = Path(__file__).resolve().parent / "results" / "cpu.jsonl"


@dataclass
class Work:
    """One line of the table: argument sets that take turns, and the bytes that a call must read."""

    op: str
    name: str
    sets: list[dict[str, Any]]
    bytes_read: int


def linears(rows: int, dtype: torch.dtype) -> Iterator[Work]:
    """linear and int8_linear on every projection and the head."""
    for name, (k, n) in LINEARS.items():
        x = torch.randn(rows, k).to(dtype)
        copies = max(2, COLD_BYTES // (n * k * dtype.itemsize))
        weights = [(torch.randn(n, k) * k**-0.5).to(dtype) for _ in range(copies)]
        yield Work("linear", name, [{"x": x, "weight": w} for w in weights], n * k * dtype.itemsize)
        held = [quantize(w) for w in weights] * 2
        sets = [{"x": x, "weight": q.clone(), "scale": s} for q, s in held]
        yield Work("int8_linear", name, sets, n * k)


def small(rows: int, dtype: torch.dtype) -> Iterator[Work]:
    """The ops between the products."""
    x = torch.randn(rows, HIDDEN).to(dtype)
    weight = torch.ones(HIDDEN, dtype=dtype)
    norm = {"x": x, "weight": weight, "eps": 1e-5}
    yield Work("rms_norm", "hidden", [norm], x.nbytes)
    yield Work("add_rms_norm", "hidden", [norm | {"residual": x.clone()}], 2 * x.nbytes)
    yield Work("layer_norm", "hidden", [norm | {"bias": weight}], x.nbytes)
    gate_up = torch.randn(rows, 2 * INNER).to(dtype)
    yield Work("silu_mul", "inner", [{"gate_up": gate_up}], gate_up.nbytes)
    yield Work("gelu_tanh", "inner", [{"x": gate_up}], gate_up.nbytes)
    angle = torch.randn(rows, DIM // 2)
    cache = [torch.zeros(rows // 16 + 1, KV_HEADS, 16, DIM, dtype=dtype) for _ in range(2)]
    rope = {"qkv": torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM).to(dtype), "k_cache": cache[0], "v_cache": cache[1]}
    rope |= {"slots": torch.arange(rows), "heads": HEADS, "cos": angle.cos(), "sin": angle.sin()}
    yield Work("rope_cache", "9/3x64", [rope], rope["qkv"].nbytes)


def attention(sequences: int, queries: int, context: int, dtype: torch.dtype) -> Work:
    """Sequences of one length with shuffled pages."""
    pages = -(-context // 16)
    order = torch.randperm(sequences * pages).to(torch.int32).view(sequences, pages)
    cache = [torch.randn(sequences * pages, KV_HEADS, 16, DIM).to(dtype) for _ in range(2)]
    args = {
        "q": torch.randn(sequences * queries, HEADS, DIM).to(dtype),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "block_tables": order,
        "query_start": torch.arange(sequences + 1, dtype=torch.int32) * queries,
        "context_lens": torch.full((sequences,), context, dtype=torch.int32),
        "max_query": queries,
        "max_context": context,
        "scale": DIM**-0.5,
    }
    return Work("paged_attention", f"{sequences}x{queries} of {context}", [args], 2 * cache[0].nbytes)


def works(rows: list[int], dtype: torch.dtype) -> Iterator[tuple[int, Work]]:
    """Every line of the table for one dtype."""
    for count in rows:
        for work in itertools.chain(linears(count, dtype), small(count, dtype)):
            yield count, work
        for context in (128, 512, 4096):
            yield count, attention(count, 1, context, dtype)
    yield 512, attention(1, 512, 512, dtype)


def in_turn(calls: list[Callable[[], Any]], rounds: int, least_s: float = 1e-4) -> list[tuple[float, float]]:
    """Median and least seconds of one call of each, the calls timed one after another in every round."""
    repeats = []
    for call in calls:
        call()
        started = time.perf_counter()
        call()
        repeats.append(max(1, int(least_s / max(time.perf_counter() - started, 1e-7))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, repeat, seconds in zip(calls, repeats, times):
            started = time.perf_counter()
            for _ in range(repeat):
                call()
            seconds.append((time.perf_counter() - started) / repeat)
    return [(statistics.median(seconds), min(seconds)) for seconds in times]


def taking_turns(function: Callable[..., Any], sets: list[dict[str, Any]]) -> Callable[[], Any]:
    """A call of ``function`` with the next argument set each time."""
    turn = itertools.cycle(sets)
    return lambda: function(**next(turn))


def read_call() -> tuple[Callable[[], Any], int]:
    """A read of a large array with all threads, and its size in bytes."""
    library = build.load()
    if isinstance(library, str):
        sys.exit(f"no kernels to measure: {library}")
    data = torch.ones(COLD_BYTES // 8, dtype=torch.int64)
    read = library.quick.modelmill_read
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return lambda: read(data.data_ptr(), data.nbytes), data.nbytes


def device() -> str:
    """The processor's name and how many cores of it are here."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    kind = f"family {found.get('cpu family', '?')} model {found.get('model', '?')}"
    name = f"{found.get('model name', platform.processor())} ({kind})"
    return f"{name}, {torch.get_num_threads()} threads"


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--ops", default="")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    read, size = read_call()
    common = {
        "command": shlex.join(["python", *sys.argv]),
        "device": device(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    print(common["device"])
    print(f"{'op':16}{'shape':20}{'dtype':10}{'rows':>5}{'ours µs':>10}{'torch µs':>10}{'×':>7}", end="")
    print(f"{'best':>10}{'torch':>10}{'GB/s':>8}{'of read':>9}")
    wanted = options.ops.split(",") if options.ops else None
    with RESULTS.open("a", encoding="utf-8") as file:
        for dtype in (getattr(torch, name) for name in options.dtypes.split(",")):
            for rows, work in works([int(n) for n in options.rows.split(",")], dtype):
                if wanted and work.op not in wanted:
                    continue
                row = measure(work, read, size, options.rounds)
                label = str(dtype).removeprefix("torch.")
                show(work, label, rows, row)
                line = common | {"op": work.op, "shape": work.name, "dtype": label, "rows": rows, "unit": "us"} | row
                file.write(json.dumps(line) + "\n")


def measure(work: Work, read: Callable[[], Any], size: int, rounds: int) -> dict[str, float]:
    """Microseconds of ours and torch's, medians and best; bandwidth and its fraction of a plain read, from the best."""
    ours = taking_turns(import_module(f"modelmill.ops.cpu.{work.op}").run, work.sets)
    reference = taking_turns(getattr(import_module(f"modelmill.ops.{work.op}"), work.op), work.sets)
    (mine, mine_best), (theirs, theirs_best), (_, read_best) = in_turn([ours, reference, read], rounds)
    speed, ceiling = work.bytes_read / mine_best / 1e9, size / read_best / 1e9
    return {
        "ours": round(mine * 1e6, 2),
        "torch": round(theirs * 1e6, 2),
        "speedup": round(theirs / mine, 2),
        "ours_best": round(mine_best * 1e6, 2),
        "torch_best": round(theirs_best * 1e6, 2),
        "gb_s": round(speed, 2),
        "of_read": round(speed / ceiling, 3),
    }


def show(work: Work, dtype: str, rows: int, row: dict[str, float]) -> None:
    """One line of the table."""
    times = f"{row['ours']:>10.1f}{row['torch']:>10.1f}{row['speedup']:>7.2f}"
    best = f"{row['ours_best']:>10.1f}{row['torch_best']:>10.1f}{row['gb_s']:>8.1f}{row['of_read']:>9.2f}"
    print(f"{work.op:16}{work.name:20}{dtype:10}{rows:>5}{times}{best}", flush=True)


if __name__ == "__main__":
    main()
