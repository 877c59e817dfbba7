"""Run the lines of the speed table on the engine core alone, for one or more weight formats.

    python benchmarks/engine_core_table.py llama-7b --as smoothquant:auto [--decode 1x128,64x1024]
        [--first 1024,4096] [--rounds 3] [--launched] [--save FILE.jsonl]

The requests, the clock and the statistic are those of ``table.py`` (time per token from calls of 16
and 144 tokens, the first token from whole calls); the weights are drawn at random, no engine is
built. --as WEIGHTS:KV, several one after the other. --launched: beside it, in turn, the same
without graphs of prompts.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.model_shapes import SHAPES  # noqa: E402
from benchmarks.model_step import random_model  # noqa: E402
from benchmarks.peer_process import Lengths, random_prompts  # noqa: E402
from benchmarks.weight_formats import WEIGHT_FORMATS  # noqa: E402
from benchmarks.workloads import Workload, measure_in_turn, parse_pairs  # noqa: E402
from modelmill.core.config import RunConfig  # noqa: E402
from modelmill.eval.bench_targets import greedy_request  # noqa: E402
from modelmill.eval.provenance import provenance  # noqa: E402
from modelmill.eval.report import versions  # noqa: E402
from modelmill.runtime.engine_core import EngineCore  # noqa: E402

MAX_MODEL_LEN, MAX_NUM_SEQS = 8192, 64


class EngineCoreSide:
    """A side of the table without a process or an engine of its own."""

    name = "modelmill"

    def __init__(self, engine_core: EngineCore) -> None:
        self.engine_core, self.count = engine_core, 0

    def generate(self, lengths: Lengths, seed: int) -> float:
        """Return seconds from submitting requests of (prompt, output) lengths to all ids."""
        requests = []
        for prompt, (_, output) in zip(random_prompts(lengths, seed), lengths, strict=True):
            requests.append(greedy_request(f"{self.name}-{self.count}", prompt, output))
            self.count += 1
        began = time.perf_counter()
        self.engine_core.add_all(requests)
        ended = 0
        while ended < len(requests):
            ended += sum(token.finish_reason is not None for token in self.engine_core.step())
        return time.perf_counter() - began


class EagerPromptSide(EngineCoreSide):
    """The same loop; the kernels of prompts are launched one by one."""

    name = "launched"

    def generate(self, lengths: Lengths, seed: int) -> float:
        """As that of ``Alone``."""
        graphs, self.engine_core.model_runner.prefill_graphs = (
            self.engine_core.model_runner.prefill_graphs,
            None,
        )
        try:
            return super().generate(lengths, seed)
        finally:
            self.engine_core.model_runner.prefill_graphs = graphs


def workloads(options: argparse.Namespace) -> list[Workload]:
    """Return the requested lines."""
    steps = [
        Workload(f"decode-{batch}x{prompt}", (prompt,) * batch)
        for batch, prompt in parse_pairs(options.decode)
    ]
    firsts = [int(each) for each in options.first.split(",") if each]
    return steps + [Workload(f"first-{prompt}", (prompt,), (1,)) for prompt in firsts]


@torch.inference_mode()
def measure(options: argparse.Namespace, weights: str, kv_dtype: str) -> None:
    """All lines with weights, keys and values held in one way; print and record."""
    model = random_model(options.shape, weights)
    config = RunConfig(
        max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False,
        kv_cache_dtype=kv_dtype,
        gpu_memory_utilization=0.8,
    )  # fmt: skip
    loop = EngineCore(model, config)
    loop.warm_up()
    sides = [EngineCoreSide(loop), *([EagerPromptSide(loop)] if options.launched else [])]
    stamp = {
        **provenance(),
        "bench": "loop", "shape": options.shape, "weights": weights, "kv": kv_dtype,
        "kernels": dict(loop.ops.backends),
        "command": "python benchmarks/engine_core_table.py " + " ".join(sys.argv[1:]),
        "versions": versions(),
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    for work in workloads(options):
        rounds = options.rounds * (3 if work.name.startswith("first") else 1)
        for name, figure in measure_in_turn(work, sides, rounds).items():  # type: ignore[arg-type]
            row: dict[str, Any] = {
                "figure": work.name,
                "unit": "ms",
                "statistic": work.statistic,
                **figure.to_dict(),
            }
            state = "" if name == EngineCoreSide.name else f" ({name})"
            spread = f"({figure.min:.3f} … {figure.max:.3f})"
            print(
                f"{weights}:{kv_dtype} {work.name}{state}: {figure.value:.3f} ms {spread}",
                flush=True,
            )
            if options.save:
                with options.save.open("a") as file:
                    file.write(json.dumps(row | stamp | ({"state": name} if state else {})) + "\n")


def main() -> None:
    """Each way in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument(
        "--as",
        dest="weights_and_kv",
        action="append",
        required=True,
        metavar="WEIGHTS:KV",
        help=", ".join(WEIGHT_FORMATS),
    )
    parser.add_argument("--decode", default="1x128,64x1024")
    parser.add_argument("--first", default="1024")
    parser.add_argument(
        "--rounds", type=int, default=3,
        help="measured rounds of a line (first: three times as many)",
    )  # fmt: skip
    parser.add_argument(
        "--launched", action="store_true", help="prompts without graphs as well, in turn"
    )
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    for weight_and_kv in options.weights_and_kv:
        weights, _, kv = weight_and_kv.partition(":")
        measure(options, weights, kv or "auto")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
