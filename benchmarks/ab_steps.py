"""Compare a model's step times with different kernel choices, in turn on one GPU.

    python benchmarks/ab_steps.py qwen-7b --prefill 1x4096 --against linear_swiglu=torch --against
                                 linear=triton [--decode 8x1024] [-q int8] [--pause 0.3] [--seconds
                                 8] [--save FILE.jsonl]

Each ``--against OP=VARIANT[,…]`` is one choice, compared with the default one ("all kernels"); it
is ``state`` in the rows. A fused op is switched off when one of its parts comes from another
backend: such side effects are part of ``state``. ``-q``: weight format (``weight_formats.py``).
Decode steps are graphs. Prompts are launched as the engine does; with --pause each waits for that
many seconds, so that the card is cool, and without it they follow one another for --seconds, and
the power limit shows.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.model_shapes import SHAPES  # noqa: E402
from benchmarks.model_step import greedy_ids, make_step, random_model, spread_fields  # noqa: E402
from benchmarks.weight_formats import WEIGHT_FORMATS  # noqa: E402
from benchmarks.weights_option import add_weights_option  # noqa: E402
from benchmarks.workloads import parse_pairs  # noqa: E402
from modelmill.eval.report import append_rows, device_name, versions  # noqa: E402
from modelmill.nn.fusion import fuse_model  # noqa: E402
from modelmill.nn.step import Step  # noqa: E402
from modelmill.ops.registry import select_backends  # noqa: E402
from modelmill.ops.timing import capture_graph, copy_bandwidth, time_interleaved  # noqa: E402

KernelChoice = Mapping[str, str]
KernelChoices = Mapping[str, KernelChoice]
MIN_TURNS = 5


def kernel_choices(against: Sequence[str]) -> dict[str, KernelChoice]:
    """The choices by their names: the usual one first."""
    return {"all kernels": {}} | {
        each: dict(pair.split("=") for pair in each.split(",")) for each in against
    }


def side_effects(
    requested: KernelChoice, usual: KernelChoice, chosen: KernelChoice
) -> dict[str, str]:
    """Return further changes of the backend selection, beyond the override: op → variant."""
    return {
        op: variant
        for op, variant in chosen.items()
        if op not in requested and variant != usual[op]
    }


def label_states(states: KernelChoices) -> dict[str, KernelChoice]:
    """The choices by names that say all that each of them changes."""
    usual = select_backends("cuda").backends
    named = {}
    for state, overrides in states.items():
        more = side_effects(overrides, usual, select_backends("cuda", overrides).backends)
        also = ",".join(f"{op}={variant}" for op, variant in more.items())
        named[f"{state} (and so {also})" if also else state] = overrides
    return named


def make_calls(model: nn.Module, step: Step, states: KernelChoices) -> list[Callable[[], Any]]:
    """The same step with each choice of kernels."""
    steps = [replace(step, ops=select_backends("cuda", kernels)) for kernels in states.values()]
    fused = fuse_model(model)
    return [functools.partial(greedy_ids, fused, each) for each in steps]


@torch.inference_mode()
def decode(
    model: nn.Module, batch: int, context: int, states: KernelChoices
) -> Iterator[dict[str, Any]]:
    """One decode step with each choice, replays in turn; milliseconds."""
    replays = []
    for call in make_calls(model, make_step(model, batch, 1, context), states):
        call()  # compiles
        replays.append(capture_graph(call))
    for state, times in zip(states, time_interleaved(replays, 15, 4, "cuda"), strict=True):
        about = {"figure": "step.decode_ms", "batch": batch, "context": context, "state": state}
        yield about | spread_fields([1e3 * each for each in times])


@torch.inference_mode()
def prefill(
    model: nn.Module, batch: int, tokens: int, states: KernelChoices, pause: float, seconds: float
) -> Iterator[dict[str, Any]]:
    """A first step with each choice, another one first in each turn; milliseconds."""
    calls = make_calls(model, make_step(model, batch, tokens, tokens), states)
    time_interleaved(calls, 1, 1, "cuda")  # compiles
    times: list[list[float]] = [[] for _ in calls]
    began, turn = time.perf_counter(), 0
    while turn < MIN_TURNS or time.perf_counter() - began < seconds:
        for index in (*range(turn % len(calls), len(calls)), *range(turn % len(calls))):
            time.sleep(pause)
            times[index] += [1e3 * each for each in time_call(calls[index])]
        turn += 1
    for state, step_times in zip(states, times, strict=True):
        about = {
            "figure": "step.prefill_ms",
            "batch": batch,
            "tokens": tokens,
            "state": state,
            "pause_s": pause,
        }
        yield about | spread_fields(step_times)


def time_call(call: Callable[[], Any]) -> list[float]:
    """Seconds of one call, by events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return [start.elapsed_time(end) / 1e3]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--decode", default="")
    parser.add_argument("--prefill", default="")
    parser.add_argument("--against", action="append", default=[], metavar="OP=VARIANT[,…]")
    add_weights_option(parser, WEIGHT_FORMATS, "dense")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--save", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, print and record."""
    options = parse_args()
    states, model, now = (
        label_states(kernel_choices(options.against)),
        random_model(options.shape, options.weights),
        datetime.now(UTC),
    )
    stamp = {
        "run": now.strftime("turns-%Y%m%dT%H%M%S"),
        "command": "python benchmarks/ab_steps.py " + " ".join(sys.argv[1:]),
        "shape": options.shape, "weights": options.weights, "unit": "ms",
        "copy_gbps": round(copy_bandwidth() / 1e9),
        "device": device_name("cuda"),
        "versions": versions(), "date": now.isoformat(timespec="seconds"),
    }  # fmt: skip
    fields = (states, options.pause, options.seconds)
    for row in itertools.chain(
        *(decode(model, b, c, states) for b, c in parse_pairs(options.decode)),
        *(prefill(model, b, n, *fields) for b, n in parse_pairs(options.prefill)),
    ):
        print(json.dumps(row), flush=True)
        if options.save is not None:
            append_rows(options.save, [row | stamp])


if __name__ == "__main__":
    main()
