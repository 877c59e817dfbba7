"""Autotunes launch configs on this GPU: a few layers with random weights, timed as CUDA graphs.

The layers are the model's own (norms, attention and all), enough of them to exceed the L2 cache, so
that a kernel is timed between its real neighbours. The row counts are those of decode steps: 1, 8,
16; with 8-bit weights also 32 and 64, where cuBLAS is not used.
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
from modelmill.artifact.autotune_store import AutotuneRecord
from modelmill.builder.autotune_search import (
    AutotuneOutcome,
    InterleavedStepTimer,
    TunableGemm,
    search_launch_configs,
)
from modelmill.builder.plan import BuildPlan
from modelmill.core import log
from modelmill.core.progress_callback import Progress
from modelmill.nn.fusion import fuse_model
from modelmill.nn.step import Step
from modelmill.nn.synthetic_step import fill_random_weights, synthetic_step
from modelmill.ops import registry
from modelmill.ops.launch_configs import GemmKey, TunedConfigsByOp, TunedLaunchConfigs, format_key
from modelmill.ops.timing import capture_graph, time_interleaved

_log = log.get_logger(__name__)

MIN_WEIGHT_BYTES = (
    64 << 20
)  # a smaller model fits in the L2 cache, and its steps are bound by launches
# layers to create at least, so that weights come from memory and the head's share is realistic
MIN_TUNING_MODEL_LAYER_BYTES = 3 << 30
TIME_LIMIT_S = 25.0
CONTEXT_LENGTH, MAX_CONTEXT_LENGTH = 128, 4096
TIMING_ROUNDS, QUEUED_REPLAYS = 9, 4


def autotune_skip_reason(plan: BuildPlan) -> str | None:
    """Return why nothing is tuned, or None if tuning is possible."""
    if plan.config.target != "cuda":
        return "the kernels of a CPU have no launch configs to tune"
    if not torch.cuda.is_available():
        return "no GPU here, so nothing was tuned: the engine runs with default launch configs"
    if plan.weight_bytes < MIN_WEIGHT_BYTES:
        size = MIN_WEIGHT_BYTES >> 20
        return f"less than {size} MiB of weights: the engine runs with default launch configs"
    if not any(
        _tunable_implementation(op, variant)
        for op, variant in registry.select_backends("cuda", plan.config.kernels).backends.items()
    ):
        return "the chosen kernels have no launch configs to tune"
    return None


@torch.inference_mode()
def autotune(plan: BuildPlan, on_progress: Progress | None = None) -> AutotuneRecord | None:
    """Tune launch configs for the GPU of this machine, in about 30 s at most.

    Any error (out of memory, an unsupported weight) is logged and the result is None: an engine
    works without tuned configs, so the build does not fail.
    """
    if autotune_skip_reason(plan) is not None:
        return None
    began = time.perf_counter()
    try:
        outcomes = _tune_all_row_counts(plan, began + TIME_LIMIT_S, on_progress)
    except Exception as error:
        _log.warning("autotuning failed: %s", " ".join(str(error).split()) or type(error).__name__)
        return None
    finally:
        torch.cuda.empty_cache()
    return make_autotune_record(torch.cuda.get_device_name(), outcomes, time.perf_counter() - began)


def _tune_all_row_counts(
    plan: BuildPlan, deadline: float, on_progress: Progress | None
) -> dict[int, AutotuneOutcome]:
    model = _build_truncated_model(plan)
    outcomes = {}
    buckets = row_counts_to_tune(plan.config.quantization)
    for number, rows in enumerate(buckets):
        outcomes[rows] = _tune_row_count(model, plan, rows, deadline)
        if on_progress is not None:
            on_progress("autotune", number + 1, len(buckets))
    return outcomes


def row_counts_to_tune(quantization: str) -> tuple[int, ...]:
    """Return the row counts to tune; larger products use cuBLAS where weights are unquantized."""
    return (1, 8, 16) if quantization == "none" else (1, 8, 16, 32, 64)


def make_autotune_record(
    device: str, outcomes: dict[int, AutotuneOutcome], seconds: float
) -> AutotuneRecord:
    """Return the stored record: the choices, and their measured gain."""
    choices: dict[str, dict[str, tuple[int, ...]]] = {}
    for outcome in outcomes.values():
        for op, chosen in outcome.choices.items():
            choices.setdefault(op, {}).update(
                {format_key(key): sizes for key, sizes in chosen.items()}
            )
    steps = {
        str(rows): {
            "default_us": _seconds_to_us(each.default_seconds),
            "tuned_us": _seconds_to_us(each.tuned_seconds),
            "untried": each.num_untried,
        }
        for rows, each in outcomes.items()
    }
    facts = {
        "steps": steps,
        "seconds": round(seconds, 1),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": {
            "modelmill": modelmill.__version__,
            "torch": torch.__version__,
            "triton": _triton_version(),
        },
    }
    return AutotuneRecord(device, choices, facts)


def _seconds_to_us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 2)


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "absent"


def _build_truncated_model(plan: BuildPlan) -> nn.Module:
    """Build the first layers of the model with random weights on the GPU."""
    layers = plan.model_config.layers
    each = sum(p.nbytes for p in plan.tensors if p.module.startswith("layers.")) // layers
    count = max(2, min(layers, -(-MIN_TUNING_MODEL_LAYER_BYTES // max(each, 1))))
    model = plan.family.Model(replace(plan.model_config, layers=min(count, layers)))
    return fill_random_weights(model, plan.weight_formats, plan.dtype, "cuda")


def _tune_row_count(
    model: nn.Module, plan: BuildPlan, rows: int, deadline: float
) -> AutotuneOutcome:
    ops = registry.select_backends("cuda", plan.config.kernels)
    step = synthetic_step(model, ops, (rows, 1, CONTEXT_LENGTH), max_context=MAX_CONTEXT_LENGTH)
    fused = fuse_model(model)  # as the runtime runs it
    race = make_interleaved_step_timer(
        lambda choices: _capture_tuned_step(fused, step, plan, choices)
    )
    return search_launch_configs(find_tunable_gemms(fused, step), race, time.perf_counter, deadline)


def _capture_tuned_step(
    model: nn.Module, step: Step, plan: BuildPlan, choices: TunedConfigsByOp
) -> Callable[[], Any]:
    ops = registry.select_backends(
        "cuda", plan.config.kernels, TunedLaunchConfigs(torch.cuda.get_device_name(), choices)
    )
    tuned = replace(step, ops=ops)

    def run() -> torch.Tensor:
        return tuned.ops.argmax(model(tuned))

    run()  # compile
    return capture_graph(run)


def make_interleaved_step_timer(
    prepare: Callable[[TunedConfigsByOp], Callable[[], Any]],
) -> InterleavedStepTimer:
    """Return a timer that prepares each choice and times all of them interleaved."""

    def race(options: Sequence[TunedConfigsByOp]) -> list[float | None]:
        calls: dict[int, Callable[[], Any]] = {}
        for index, choices in enumerate(options):
            try:
                calls[index] = prepare(choices)
            except torch.OutOfMemoryError:
                raise
            except (
                Exception
            ):  # a config that does not compile or fit here (triton's own errors) is no candidate
                if index == 0:
                    raise
        samples = time_interleaved(list(calls.values()), TIMING_ROUNDS, QUEUED_REPLAYS, "cuda")
        medians = dict(zip(calls, (statistics.median(times) for times in samples), strict=True))
        return [medians.get(index) for index in range(len(options))]

    return race


def find_tunable_gemms(model: nn.Module, step: Step) -> list[TunableGemm]:
    """Return the GEMMs of a step whose implementation has launch configs, by recording one step."""
    weight_bytes: dict[tuple[str, GemmKey], int] = {}

    def watched(op: str, module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        front = step.ops.backends[op]
        backends = registry.implementations(op)
        tuned = next(name for name, each in backends.items() if each is module)

        def spy(*args: Any) -> Any:
            if registry.backend_serves_args(op, tuned, *args) and (
                tuned == front or not registry.backend_serves_args(op, front, *args)
            ):
                x, weight = args[0][:2] if len(args) == 1 else args[:2]
                key = module.gemm_key(x, weight)
                weight_bytes[op, key] = weight_bytes.get((op, key), 0) + weight.nbytes
            return call(*args)

        return spy

    spies: dict[str, Any] = {}
    for op, variant in step.ops.backends.items():
        module, call = _tunable_implementation(op, variant), getattr(step.ops, op)
        if module is not None and call is not None:
            spies[op] = watched(op, module, call)
    model(replace(step, ops=step.ops.replace(spies)))
    total = sum(weight_bytes.values())
    offered = {
        (op, key): _tunable_implementation(op, step.ops.backends[op]).candidates(key)
        for op, key in weight_bytes
    }
    return [
        TunableGemm(*each, weight_bytes[each] / total, sizes)
        for each, sizes in offered.items()
        if len(sizes) > 1
    ]


def _tunable_implementation(op: str, implementation: str) -> Any:
    """Return the module of an implementation that can be tuned, or of its fallback; else None."""
    order = registry.BACKEND_PREFERENCE["cuda"]
    behind = order[order.index(implementation) :] if implementation in order else (implementation,)
    modules = (registry.implementations(op).get(name) for name in behind)
    return next((module for module in modules if hasattr(module, "candidates")), None)
