"""Times decode steps of a model shape on the GPU by how their tokens are chosen.

    python benchmarks/sampling.py qwen-7b [--batch 1,64] [--context 128] [--save FILE.jsonl]

Each row of a batch has top-k 50 and top-p 0.9 at temperature 0.8. ``greedy``: argmax, in the
step's graph. ``drawn``: ``ops.sample``, in the graph. ``sorted``: the logits leave the graph, and
the vocabulary is sorted behind it. All are timed in turn, round by round; the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.model_shapes import SHAPES  # noqa: E402
from benchmarks.model_step import make_step, random_model  # noqa: E402
from modelmill.eval.provenance import provenance  # noqa: E402
from modelmill.nn.fusion import fuse_model  # noqa: E402
from modelmill.nn.step import Step  # noqa: E402
from modelmill.ops.sample import SampleInputs, random_case  # noqa: E402
from modelmill.ops.timing import capture_graph, time_interleaved  # noqa: E402


def sample_by_sort(logits: torch.Tensor, sampling_inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Top-k, top-p and a draw as they are usually written."""
    logits = logits / sampling_inputs["temperature"][:, None]
    kth = logits.topk(50, dim=-1).values[:, -1:]
    logits = logits.masked_fill(logits < kth, float("-inf"))
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    likely = values.softmax(-1)
    out = likely.cumsum(-1) - likely >= sampling_inputs["top_p"][:, None]
    logits = logits.masked_fill(
        torch.ones_like(logits, dtype=torch.bool).scatter_(1, order, out), float("-inf")
    )
    running = logits.softmax(-1).cumsum(-1)
    target = sampling_inputs["noise"].float()[:, None] * running[:, -1:]
    return torch.searchsorted(running, target, right=True)[:, 0]


def make_sampling_inputs(batch: int, vocab: int) -> dict[str, torch.Tensor]:
    """How every row is drawn."""
    options = random_case(batch, vocab, "cuda", sampling=0).args
    del options["logits"]
    options["min_p"].zero_()
    return options


def make_variants(
    model: nn.Module, step: Step, sampling_inputs: dict[str, torch.Tensor]
) -> dict[str, Callable[[], Any]]:
    """A step of each way, ready to be timed while the caller holds what the graphs read."""
    ops = step.ops
    logits_buffer: list[torch.Tensor] = []

    fused = fuse_model(model)

    def leave() -> None:
        logits_buffer[:] = [fused(step)]

    inside = {
        "greedy by torch": lambda: fused(step).argmax(-1),
        "greedy": lambda: ops.argmax(fused(step)),
        "drawn": lambda: ops.sample(SampleInputs(fused(step), **sampling_inputs)),
        "logits": leave,
    }
    graphs: dict[str, Callable[[], Any]] = {}
    for name, call in inside.items():
        call()  # compiles
        graphs[name] = capture_graph(call)
    logits, outside = logits_buffer[0], graphs["logits"]

    def then_sorted() -> torch.Tensor:
        outside()
        return sample_by_sort(logits, sampling_inputs)

    return {**graphs, "sorted": then_sorted}


@torch.inference_mode()
def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    model = random_model(options.shape)
    stamp = {
        **provenance(),
        "command": "python benchmarks/sampling.py " + " ".join(sys.argv[1:]),
        "shape": options.shape, "unit": "ms",
        "device": torch.cuda.get_device_name(), "versions": {"torch": torch.__version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    for batch in map(int, options.batch.split(",")):
        step = make_step(model, batch, 1, options.context)
        fields = make_sampling_inputs(batch, int(model.config.vocab))  # type: ignore[union-attr, arg-type]
        calls = make_variants(model, step, fields)
        for name, seconds in zip(
            calls, time_interleaved(list(calls.values()), 15, 4, "cuda"), strict=True
        ):
            facts = {"batch": batch, "context": options.context, "chosen": name}
            row = {
                "figure": "step.sampled_ms",
                **facts,
                "value": round(statistics.median(seconds) * 1e3, 3),
            }
            print(json.dumps(row), flush=True)
            if options.save:
                with options.save.open("a") as file:
                    file.write(json.dumps(row | stamp) + "\n")


if __name__ == "__main__":
    main()
