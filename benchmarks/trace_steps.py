"""Serves the conversation trace with the loop alone and says where the GPU's time goes, step by step.

    python benchmarks/trace_steps.py qwen-7b --trace azure_conversation_trace.csv [--order longest] [--budget 8192]
        [--kv auto] [--save FILE.jsonl]

Seeded random weights, no text, no engine on disk. Steps are grouped by what they hold: single tokens only (by how many
sequences) or chunks of prompts beside them (by tokens). For each group: its time by CUDA events, and what the
memory and the tensor cores would need for the same reads and products.
"""

from __future__ import annotations

import argparse
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

from benchmarks.step import copy_rate, random_model, weight_bytes  # noqa: E402
from modelmill.core.config import RunConfig  # noqa: E402
from modelmill.core.types import Request, SamplingParams  # noqa: E402
from modelmill.eval.texts import read_trace  # noqa: E402
from modelmill.runtime.loop import Loop  # noqa: E402
from modelmill.runtime.scheduler import Schedule  # noqa: E402

FLOPS = 700e12  # products of many rows on an H200 that is warm
ORDERS: dict[str, Callable[[tuple[int, int]], Any] | None] = {
    "arrival": None,
    "longest": lambda work: -work[1],
    "total": lambda work: -(work[0] + work[1]),
}


@dataclass
class Kept:
    """One step: its single tokens, its prompt tokens, the keys that were read, and its events."""

    singles: int
    prompts: int
    keys: int
    start: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def group(self) -> str:
        if self.prompts:
            bound = next(b for b in (256, 512, 1024, 2048, 4096, 1 << 30) if self.prompts + self.singles <= b)
            return f"mixed <= {bound}"
        return f"decode <= {next(b for b in (1, 8, 32, 64, 128, 192, 256) if self.singles <= b)}"


def watch(loop: Loop) -> list[Kept]:
    """Have every launched step noted, with events around it."""
    kept: list[Kept] = []
    launch = loop.runner.launch

    def noted(plan: Schedule) -> Any:
        counts = [(seq.computed, count) for seq, count in plan.work]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        flight = launch(plan)
        end.record()
        singles = sum(1 for _, c in counts if c == 1)
        keys = sum(done + c for done, c in counts)
        kept.append(Kept(singles, sum(c for _, c in counts if c > 1), keys, start, end))
        return flight

    loop.runner.launch = noted  # type: ignore[method-assign]
    return kept


def serve(loop: Loop, work: list[tuple[int, int]], seed: int) -> float:
    """Seconds to serve all of ``work`` at once."""
    draw = random.Random(seed)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for number, (prompt, new) in enumerate(work):
        ids = [draw.randrange(5, 30000) for _ in range(prompt)]
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        loop.add(Request(id=f"{seed}-{number}", prompt=tuple(ids), params=params))
    while loop.has_work:
        loop.step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def table(kept: list[Kept], loop: Loop, rate: float) -> list[dict[str, Any]]:
    """One row per group: steps, seconds, and the floor of its reads and products in seconds."""
    model = loop.model
    weights, token = weight_bytes(model), loop.runner.kv.nbytes / (loop.runner.kv.pages * loop.page_size)
    each = 2 * weights / 2  # two operations a weight, two bytes a weight
    rows: dict[str, dict[str, Any]] = {}
    for step in kept:
        row = rows.setdefault(step.group, {"group": step.group, "steps": 0, "s": 0.0, "keys_s": 0.0, "products_s": 0.0})
        row["steps"] += 1
        row["s"] += step.start.elapsed_time(step.end) / 1e3
        row["keys_s"] += step.keys * token / rate
        row["products_s"] += max(weights / rate, (step.singles + step.prompts) * each / FLOPS)
    return [rows[g] for g in sorted(rows)]


@torch.inference_mode()
def main() -> None:
    """Serve, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--order", action="append", choices=sorted(ORDERS))
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    work = [tuple(w) for w in read_trace(options.trace, options.requests, 4096)]
    model = random_model(options.shape)
    rate = copy_rate()
    config = RunConfig(
        max_num_seqs=256, max_num_batched_tokens=options.budget, enable_prefix_caching=False, max_model_len=4096
    )
    loop = Loop(model, config)
    loop.warm_up()
    serve(loop, work[:8], 1)
    kept = watch(loop)
    for number, name in enumerate(options.order or ["arrival"]):
        order = ORDERS[name]
        kept.clear()
        seconds = serve(loop, work if order is None else sorted(work, key=order), 2 + number)
        rows = table(kept, loop, rate)
        for row in rows:
            print(
                f"{row['group']:16} {row['steps']:5} steps {row['s']:7.2f} s   floor: keys {row['keys_s']:6.2f} "
                f"+ products {row['products_s']:6.2f} s",
                flush=True,
            )
        gpu = sum(r["s"] for r in rows)
        floor = sum(r["keys_s"] + r["products_s"] for r in rows)
        line = {
            "figure": "trace.loop_s", "value": seconds, "gpu_s": gpu, "floor_s": floor, "order": name,
            "preemptions": loop.stats().preemptions, "pages": loop.num_pages, "groups": rows, "shape": options.shape,
            "copy_gbps": round(rate / 1e9), "command": "python benchmarks/trace_steps.py " + " ".join(sys.argv[1:]),
            "device": torch.cuda.get_device_name(), "versions": {"torch": torch.__version__},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        print(json.dumps({k: v for k, v in line.items() if k != "groups"}), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
