"""Run the conversation trace on the engine core alone and report GPU time step by step.

    python benchmarks/trace_steps.py qwen-7b --trace azure [--order together]
        [--budget 8192] [--as dense:auto --as smoothquant:int8 …] [--runs 1] [--save FILE.jsonl]

Seeded random weights, no text, no engine on disk. Steps are grouped by what they hold: single
tokens only (by how many sequences) or chunks of prompts beside them (by tokens). For each group:
its time by CUDA events, and what the
memory and the tensor cores (in bfloat16) would need for the same reads and products. --as
WEIGHTS:KV: how weights,
and keys and values, are held (and :N, tokens of a step in which prompts join running answers),
several one after the other on the same card. Each is warmed up with the same requests at
an eighth of their lengths.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import trace_file  # noqa: E402
from benchmarks.model_step import copy_bandwidth, random_model, weight_bytes  # noqa: E402
from benchmarks.weight_formats import WEIGHT_FORMATS  # noqa: E402
from benchmarks.workloads import warm_up  # noqa: E402
from modelmill.core.config import RunConfig  # noqa: E402
from modelmill.core.types import Request, SamplingParams  # noqa: E402
from modelmill.eval.datasets import sample_request_lengths  # noqa: E402
from modelmill.eval.provenance import provenance  # noqa: E402
from modelmill.nn.linear import Linear  # noqa: E402
from modelmill.runtime.engine_core import EngineCore  # noqa: E402
from modelmill.runtime.pending_step import StepForwardResult  # noqa: E402
from modelmill.runtime.scheduler import Schedule  # noqa: E402

FLOPS = 700e12  # bfloat16 products of many rows on an H200 that is warm
ORDERS: dict[str, Callable[[tuple[int, int]], Any] | None] = {
    "arrival": None,
    "together": None,  # as LLM.generate hands them in: the loop puts the longest answers first
    "longest": lambda work: -work[1],
    "total": lambda work: -(work[0] + work[1]),
}


@dataclass
class StepRecord:
    """One step: its single tokens, its prompt tokens, the keys that were read, and its events."""

    singles: int
    prompts: int
    keys: int
    start: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def group(self) -> str:
        """Name the group of steps by prompt tokens and sequences."""
        if self.prompts:
            bound = next(
                b for b in (256, 512, 1024, 2048, 4096, 1 << 30) if self.prompts + self.singles <= b
            )
            return f"mixed <= {bound}"
        return f"decode <= {next(b for b in (1, 8, 32, 64, 128, 192, 256) if self.singles <= b)}"


def record_steps(engine_core: EngineCore) -> list[StepRecord]:
    """Have every launched step noted, with events around it."""
    records: list[StepRecord] = []
    runner = engine_core.model_runner
    run, sample = runner.launch_forward, runner.launch_sampling
    starts: list[torch.cuda.Event] = []

    def started(plan: Schedule) -> Any:
        starts.append(torch.cuda.Event(enable_timing=True))
        starts[-1].record()
        return run(plan)

    def record(forward: StepForwardResult) -> Any:
        counts = [(seq.computed, count) for seq, count in forward.schedule.work]
        start, end = starts.pop(), torch.cuda.Event(enable_timing=True)
        pending = sample(forward)
        end.record()
        singles = sum(1 for _, c in counts if c == 1)
        keys = sum(done + c for done, c in counts)
        records.append(StepRecord(singles, sum(c for _, c in counts if c > 1), keys, start, end))
        return pending

    runner.launch_forward, runner.launch_sampling = started, record  # type: ignore[method-assign, assignment]
    return records


def serve_trace(
    engine_core: EngineCore, workload: list[tuple[int, int]], seed: int, *, together: bool = False
) -> float:
    """Seconds to serve all of ``workload`` at once; together: handed in with one call."""
    draw = random.Random(seed)
    requests = []
    for number, (prompt, new) in enumerate(workload):
        ids = [draw.randrange(5, 30000) for _ in range(prompt)]
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        requests.append(Request(id=f"{seed}-{number}", prompt=tuple(ids), params=params))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    if together:
        engine_core.add_all(requests)
    else:
        for request in requests:
            engine_core.add(request)
    while engine_core.has_work:
        engine_core.step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def group_table(
    records: list[StepRecord], engine_core: EngineCore, rate: float
) -> list[dict[str, Any]]:
    """One row per group: steps, seconds, and the floor of its reads and products in seconds."""
    model = engine_core.model
    weights, token = (
        weight_bytes(model),
        engine_core.kv_shape.token_bytes(engine_core.kv_dtype),
    )
    # operations a token
    each = 2 * sum(m.shape[0] * m.shape[1] for m in model.modules() if isinstance(m, Linear))
    rows: dict[str, dict[str, Any]] = {}
    for step in records:
        row = rows.setdefault(
            step.group,
            {"group": step.group, "steps": 0, "s": 0.0, "keys_s": 0.0, "products_s": 0.0},
        )
        row["steps"] += 1
        row["s"] += step.start.elapsed_time(step.end) / 1e3
        row["keys_s"] += step.keys * token / rate
        row["products_s"] += max(weights / rate, (step.singles + step.prompts) * each / FLOPS)
    return [rows[g] for g in sorted(rows)]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape")
    parser.add_argument("--trace", type=trace_file.parse_trace, required=True, help=trace_file.HELP)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--order", action="append", choices=sorted(ORDERS))
    parser.add_argument(
        "--as",
        dest="weights_and_kv",
        action="append",
        metavar="WEIGHTS:KV[:N]",
        help=", ".join(WEIGHT_FORMATS),
    )
    parser.add_argument("--runs", type=int, default=1, help="of each, after its warm-up")
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--save", type=Path)
    return parser.parse_args()


@torch.inference_mode()
def measure(
    options: argparse.Namespace, weight_format: str, work: list[tuple[int, int]], rate: float
) -> None:
    """Serve with weights, keys and values held in one way; print and record."""
    weights, kv, mixed = (*weight_format.split(":"), "", "")[:3]
    model = random_model(options.shape, weights)
    config = RunConfig(
        max_num_seqs=256, max_num_batched_tokens=options.budget, enable_prefix_caching=False,
        max_model_len=4096,
        kv_cache_dtype=kv or "auto", max_mixed_tokens=int(mixed) if mixed else None,
    )  # fmt: skip
    loop = EngineCore(model, config)
    loop.warm_up()
    serve_trace(loop, warm_up(work), 1, together=True)
    records = record_steps(loop)
    for number, name in enumerate((options.order or ["together"]) * options.runs):
        order = ORDERS[name]
        records.clear()
        done = work if order is None else sorted(work, key=order)
        seconds = serve_trace(loop, done, 2 + number, together=name == "together")
        rows = group_table(records, loop, rate)
        for row in rows:
            print(
                f"{row['group']:16} {row['steps']:5} steps {row['s']:7.2f} s   floor: keys "
                f"{row['keys_s']:6.2f} "
                f"+ products {row['products_s']:6.2f} s",
                flush=True,
            )
        gpu = sum(r["s"] for r in rows)
        floor = sum(r["keys_s"] + r["products_s"] for r in rows)
        line = {
            "figure": "trace.loop_s", "value": seconds, "gpu_s": gpu, "floor_s": floor,
            "order": name,
            "weights": weights, "kv": kv or "auto", "mixed": loop.scheduler.limits.max_mixed_tokens,
            "requests_per_s": len(work) / seconds, "kernels": dict(loop.ops.backends),
            "preemptions": loop.stats().preemptions, "pages": loop.num_pages, "groups": rows,
            "shape": options.shape,
            "copy_gbps": round(rate / 1e9),
            "command": "python benchmarks/trace_steps.py " + " ".join(sys.argv[1:]),
            **provenance(), "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        print(
            json.dumps({k: v for k, v in line.items() if k not in ("groups", "kernels")}),
            flush=True,
        )
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    """Each way of holding weights, keys and values in turn."""
    options = parse_args()
    work = sample_request_lengths(options.trace, options.requests, 4096)
    rate = copy_bandwidth()
    for weight_and_kv in options.weights_and_kv or ["dense:auto"]:
        measure(options, weight_and_kv, work, rate)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
