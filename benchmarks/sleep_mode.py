"""Time how long an engine of a model shape takes to go to sleep and to wake up.

    python benchmarks/sleep_mode.py [qwen-7b] [-q int4] [--kv-cache-bytes 8589934592]
                                    [--rounds 5] [--pause 0] [--device cuda] [--save FILE.jsonl]

The engine has seeded random weights, a KV cache and, on a GPU, captured CUDA graphs. In each round
it answers a prompt, sleeps, wakes up and answers again. The run fails if the answers differ or if
the free memory of the GPU does not grow by the weights and the KV cache while it sleeps. A row has
the median over rounds, and ``first``: the first round pins its host memory, later ones follow so
soon that they use what is still pinned (``loader.pinned_blocks``), unless --pause lets it go.

Expected of a 7B model in 16 bits on one H200 (14.2 GB; 55 GB/s from pinned memory), before it was
run: waking up 0.3 to 0.5 s, the copy and some calls of the driver; going to sleep 0.3 s with pinned
memory, else what touching and pinning 14.2 GB takes, 1 to 3 s.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.append_rows import append_rows, portable_command  # noqa: E402
from benchmarks.model_shapes import SHAPES  # noqa: E402
from benchmarks.model_step import random_model  # noqa: E402
from benchmarks.weight_formats import WEIGHT_FORMATS  # noqa: E402
from benchmarks.weights_option import add_weights_option  # noqa: E402
from modelmill.core.byte_size import format_bytes  # noqa: E402
from modelmill.core.config import RunConfig  # noqa: E402
from modelmill.core.types import Request, SamplingParams  # noqa: E402
from modelmill.eval.report import MeasurementStats, versions  # noqa: E402
from modelmill.runtime.engine_core import EngineCore  # noqa: E402
from modelmill.runtime.sleep_mode import sleep, wake_up  # noqa: E402

PROMPT, OUTPUT = 64, 16
FREED_FRACTION = 0.98
"""Of weights and KV cache that must be free while the engine sleeps: mappings round up."""


@dataclass(frozen=True)
class SleepRound:
    """One sleep.

    Attributes:
        sleep_ms: until the memory was given back.
        wake_ms: until the engine takes requests.
        first_token_ms: from the next request to its first token.
        host_bytes: of the weights meanwhile.
        freed_bytes: of the GPU, as the driver tells; 0 on a CPU.
        left_bytes: of the GPU that this process's allocator still takes.
    """

    sleep_ms: float
    wake_ms: float
    first_token_ms: float
    host_bytes: int
    freed_bytes: int
    left_bytes: int


def time_round(core: EngineCore, number: int) -> SleepRound:
    """Answer, sleep, wake up and answer again.

    Raises:
        SystemExit: the answers differ, or the memory was not given back.
    """
    expected, _ = answer(core, f"before {number}")
    free = free_bytes(core)
    report = sleep(core)
    freed = free_bytes(core) - free
    kv_bytes = core.model_runner.kv.nbytes
    if core.device != "cpu" and freed < FREED_FRACTION * (report.host_bytes + kv_bytes):
        raise SystemExit(f"only {format_bytes(freed)} were given back")
    woken = wake_up(core)
    ids, first_token_seconds = answer(core, f"after {number}")
    if ids != expected:
        raise SystemExit(f"the answer after waking up is {ids}, before it was {expected}")
    return SleepRound(
        report.seconds * 1e3,
        woken.seconds * 1e3,
        first_token_seconds * 1e3,
        report.host_bytes,
        freed,
        report.device_bytes,
    )


def answer(core: EngineCore, request_id: str) -> tuple[list[int], float]:
    """The ids of a greedy answer, and the seconds to the first of them."""
    prompt = tuple(7 * position % (core.vocab - 2) + 1 for position in range(PROMPT))
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    began, first = time.perf_counter(), 0.0
    # a salt of its own: every answer computes its prompt, with the same kernels
    params = params.with_defaults({})
    core.add(Request(id=request_id, prompt=prompt, params=params, cache_salt=request_id))
    ids: list[int] = []
    while core.has_work:
        ids += [event.token_id for event in core.step() if event.token_id is not None]
        first = first or (time.perf_counter() - began if ids else 0.0)
    return ids, first


def free_bytes(core: EngineCore) -> int:
    """Free memory of the GPU; 0 on a CPU."""
    return 0 if core.device == "cpu" else torch.cuda.mem_get_info(torch.device(core.device))[0]


def rows(rounds: Sequence[SleepRound], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each time: the median over the rounds, and how far they spread."""
    first = rounds[0]
    memory = {
        "host_bytes": first.host_bytes,
        "freed_bytes": first.freed_bytes,
        "left_bytes": first.left_bytes,
    }
    out = []
    for name in ("sleep_ms", "wake_ms", "first_token_ms"):
        times = [getattr(each, name) for each in rounds]
        spread = MeasurementStats.from_values(times)
        out.append(
            {
                "figure": f"sleep.{name}",
                "unit": "ms",
                "value": spread.median,
                "first": times[0],
                "spread": asdict(spread),
                "facts": {**facts, **memory},
            }
        )
    return out


def make_core(shape: str, weights: str, device: str, kv_cache_bytes: int) -> EngineCore:
    """An engine core in sleep mode, warmed up."""
    config = RunConfig(
        device=device,
        kv_cache_bytes=kv_cache_bytes,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        enable_sleep_mode=True,
    )
    core = EngineCore(random_model(shape, weights, device=device), config, max_model_len=2048)
    core.warm_up()
    return core


def parse_args(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", nargs="?", default="qwen-7b", choices=sorted(SHAPES))
    add_weights_option(parser, WEIGHT_FORMATS, "dense")
    parser.add_argument("--kv-cache-bytes", type=int, default=8 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two rounds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--save", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Measure, print and record; returns the rows."""
    options = parse_args(arguments)
    core = make_core(options.shape, options.weights, options.device, options.kv_cache_bytes)
    rounds = []
    for number in range(options.rounds):
        rounds.append(time_round(core, number))
        print(f"round {number}: {rounds[-1]}", flush=True)
        time.sleep(options.pause)
    on_gpu = core.device != "cpu"
    facts = {
        "shape": options.shape,
        "weights": options.weights,
        "kv_bytes": core.model_runner.kv.nbytes,
        "device": torch.cuda.get_device_name(core.device) if on_gpu else "cpu",
        "versions": versions(),
    }
    measured = rows(rounds, facts)
    for row in measured:
        print(f"{row['figure']}: {row['value']:.1f} (first {row['first']:.1f})")
    if options.save:
        append_rows(options.save, measured, portable_command("sleep_mode", arguments))
    return measured


if __name__ == "__main__":
    main(sys.argv[1:])
