"""Tunes launch sizes on the GPU of this machine: a few layers of the model with random weights, steps as graphs.

The layers are the model's own (norms, attention and all), enough of them to leave the cache, so that a kernel is timed
between the neighbours that it will have. Rows as decoding has them: 1, 8, 16; with weights in 8 bits also 32 and 64,
where cuBLAS has no part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch
from torch import nn

import modelmill
from modelmill.artifact.tuning import StoredTuning
from modelmill.build.plan import Plan
from modelmill.build.tuning import Outcome, Product, Race, search
from modelmill.core import log
from modelmill.nn.step import Step
from modelmill.nn.trial import draw_weights, trial_step
from modelmill.ops import shelf
from modelmill.ops.clock import in_turn, recorded
from modelmill.ops.tuning import Choices, Key, Tuning, key_text

_log = log.get(__name__)

LEAST_BYTES = 64 << 20  # a smaller model lives in the cache, and its steps are launches
LAYER_BYTES = 3 << 30  # drawn at least: weights come from memory, and the head is no larger part than it will be
LIMIT_S = 25.0
CONTEXT, BOUND = 128, 4096
ROUNDS, QUEUED = 9, 4


def why_not(plan: Plan) -> str | None:
    """Why nothing is tuned; None where there is something to tune."""
    if plan.config.target != "cuda":
        return "the kernels of a CPU have no launch sizes to tune"
    if not torch.cuda.is_available():
        return "no GPU here, so nothing was tuned: the engine runs with default launch sizes"
    if plan.weight_bytes < LEAST_BYTES:
        return f"less than {LEAST_BYTES >> 20} MiB of weights: default launch sizes serve"
    if not any(_offers(op, variant) for op, variant in shelf.resolve("cuda", plan.config.kernels).chosen.items()):
        return "the chosen kernels have no launch sizes to tune"
    return None


@torch.inference_mode()
def tune(plan: Plan, progress: Callable[[str, int, int], None] | None = None) -> StoredTuning | None:
    """Launch sizes for the GPU of this machine; None where ``why_not`` says so. At most some 30 s.

    Whatever goes wrong (memory, a weight that cannot be drawn) is logged and means None: an engine without tuned sizes
    is a good engine, and no build fails for want of them.
    """
    if why_not(plan) is not None:
        return None
    began = time.perf_counter()
    try:
        outcomes = _outcomes(plan, began + LIMIT_S, progress)
    except Exception as error:
        _log.warning("nothing was tuned: %s", " ".join(str(error).split()) or type(error).__name__)
        return None
    finally:
        torch.cuda.empty_cache()
    return stored(torch.cuda.get_device_name(), outcomes, time.perf_counter() - began)


def _outcomes(plan: Plan, until: float, progress: Callable[[str, int, int], None] | None) -> dict[int, Outcome]:
    model = _few_layers(plan)
    found = {}
    buckets = rows_of(plan.config.quantization)
    for number, rows in enumerate(buckets):
        found[rows] = _tune_rows(model, plan, rows, until)
        if progress is not None:
            progress("tuning", number + 1, len(buckets))
    return found


def rows_of(quantization: str) -> tuple[int, ...]:
    """Rows to tune for; the products of more are cuBLAS's where weights are held as they are."""
    return (1, 8, 16) if quantization == "none" else (1, 8, 16, 32, 64)


def stored(device: str, outcomes: dict[int, Outcome], seconds: float) -> StoredTuning:
    """What is written: the choices, and what they were worth when they were made."""
    choices: dict[str, dict[str, tuple[int, ...]]] = {}
    for outcome in outcomes.values():
        for op, chosen in outcome.choices.items():
            choices.setdefault(op, {}).update({key_text(key): sizes for key, sizes in chosen.items()})
    steps = {
        str(rows): {"default_us": _us(each.default), "tuned_us": _us(each.tuned), "untried": each.untried}
        for rows, each in outcomes.items()
    }
    facts = {
        "steps": steps,
        "seconds": round(seconds, 1),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": {"modelmill": modelmill.__version__, "torch": torch.__version__, "triton": _triton()},
    }
    return StoredTuning(device, choices, facts)


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 2)


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "absent"


def _few_layers(plan: Plan) -> nn.Module:
    """The first layers of the model, with random weights on the GPU."""
    layers = plan.sizes.layers
    each = sum(p.nbytes for p in plan.pieces if p.module.startswith("layers.")) // layers
    count = max(2, min(layers, -(-LAYER_BYTES // max(each, 1))))
    model = plan.family.Model(replace(plan.sizes, layers=min(count, layers)))
    return draw_weights(model, plan.held, plan.dtype, "cuda")


def _tune_rows(model: nn.Module, plan: Plan, rows: int, until: float) -> Outcome:
    ops = shelf.resolve("cuda", plan.config.kernels)
    step = trial_step(model, ops, (rows, 1, CONTEXT), bound=BOUND)
    race = racing(lambda choices: _replay(model, step, plan, choices))
    return search(products_of(model, step), race, time.perf_counter, until)


def _replay(model: nn.Module, step: Step, plan: Plan, choices: Choices) -> Callable[[], Any]:
    ops = shelf.resolve("cuda", plan.config.kernels, Tuning(torch.cuda.get_device_name(), choices))
    tuned = replace(step, ops=ops)

    def run() -> torch.Tensor:
        return tuned.ops.argmax(model(tuned))

    run()  # compiles
    return recorded(run)


def racing(prepare: Callable[[Choices], Callable[[], Any]]) -> Race:
    """A race of what ``prepare`` makes of each choice, in turn."""

    def race(options: Sequence[Choices]) -> list[float | None]:
        calls: dict[int, Callable[[], Any]] = {}
        for index, choices in enumerate(options):
            try:
                calls[index] = prepare(choices)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # what does not compile or fit here (triton's own errors) is no candidate
                if index == 0:
                    raise
        found = in_turn(list(calls.values()), ROUNDS, QUEUED, "cuda")
        medians = dict(zip(calls, (statistics.median(times) for times in found), strict=True))
        return [medians.get(index) for index in range(len(options))]

    return race


def products_of(model: nn.Module, step: Step) -> list[Product]:
    """The products of a step whose chosen variant can be tuned, by watching one."""
    seen: dict[tuple[str, Key], int] = {}

    def watched(op: str, module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        front = shelf.variants(op)[step.ops.chosen[op]]

        def spy(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
            if module.supports(x, weight, *rest) and (module is front or not front.supports(x, weight, *rest)):
                key = module.key_of(x, weight)
                seen[op, key] = seen.get((op, key), 0) + weight.nbytes
            return call(x, weight, *rest)

        return spy

    spies: dict[str, Any] = {}
    for op, variant in step.ops.chosen.items():
        module, call = _offers(op, variant), getattr(step.ops, op)
        if module is not None and call is not None:
            spies[op] = watched(op, module, call)
    model(replace(step, ops=replace(step.ops, **spies)))
    total = sum(seen.values())
    offered = {(op, key): _offers(op, step.ops.chosen[op]).candidates(key) for op, key in seen}
    return [Product(*each, seen[each] / total, sizes) for each, sizes in offered.items() if len(sizes) > 1]


def _offers(op: str, variant: str) -> Any:
    """The module of a variant that can be tuned, or of the one behind it that serves what it does not; else None."""
    order = shelf.PREFERENCE["cuda"]
    behind = order[order.index(variant) :] if variant in order else (variant,)
    found = (shelf.variants(op).get(name) for name in behind)
    return next((module for module in found if hasattr(module, "candidates")), None)
