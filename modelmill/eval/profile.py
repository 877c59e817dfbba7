"""Step time by kernel on a GPU or by op on a CPU, each with its roofline minimum.

The step is the engine's own (weights, KV pages, ops, CUDA graph); its sequences have one length,
random ids and random pages. The roofline times are from the costs that ops declare and the rates
measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from modelmill.core.errors import CapacityError, UsageError
from modelmill.eval import chrome_trace
from modelmill.eval.kernel_trace import (
    kernels_from_events,
    label_graph_kernels,
    record_profiler_events,
    split_kernels_by_run,
    with_gap_and_added_times,
)
from modelmill.eval.op_trace import TraceSlice, trace_ops
from modelmill.eval.profile_lines import (
    ProfileLine,
    costs_by_call,
    cpu_trace_tracks,
    gpu_trace_tracks,
    kernel_lines,
    kernels_elapsed_us,
    median_run,
    op_lines,
    roofline_step_us,
    sort_and_add_shares,
)
from modelmill.eval.report import BenchResult, MeasurementStats
from modelmill.eval.roofline import RooflineCeilings
from modelmill.nn.fusion import fuse_model
from modelmill.nn.step import Step
from modelmill.nn.synthetic_step import synthetic_step
from modelmill.ops import timing
from modelmill.runtime.graph_sizes import context_bucket

Tracks = dict[str, list[chrome_trace.TraceEvent]]
PHASES = ("decode", "prefill")
TIMING_ROUNDS = 15
REPLAYS_PER_SAMPLE = 4
PROFILED_RUNS = 3
CPU_ROUNDS, CPU_WARMUP_ROUNDS = 7, 2


@dataclass(frozen=True)
class Profile(BenchResult):
    """Profile of one phase.

    step_us: without the profiler. seen_us: the profiled step that the lines describe. gap_us: idle
    time. floor_us: the longer of reading weights, keys and values once and of the operations. how:
    "graph", "launched" (by Python) or "host" (CPU). inside: the single ops inside a whole-model op,
    run one by one.
    """

    phase: str
    batch: int
    prompt: int
    how: str
    step_us: MeasurementStats
    seen_us: float
    gap_us: float
    floor_us: float
    lines: tuple[ProfileLine, ...]
    inside: tuple[ProfileLine, ...] = ()


@dataclass(frozen=True)
class ProfileCase:
    """What to profile: ``batch`` sequences of ``prompt`` tokens, in decode or prefill."""

    phase: str
    batch: int
    prompt: int


@torch.inference_mode()
def profile_case(
    engine_core: Any, case: ProfileCase, roofline: RooflineCeilings
) -> tuple[Profile, Tracks]:
    """Profile a step of an engine core.

    The engine core must be idle, because its pages are overwritten.

    Returns:
        The profile and the tracks of its trace.

    Raises:
        UsageError, CapacityError: if such a step does not fit the engine.
    """
    return profile_step(engine_core.model, make_profile_step(engine_core, case), case, roofline)


@torch.inference_mode()
def profile_step(
    model: nn.Module, step: Step, case: ProfileCase, roofline: RooflineCeilings
) -> tuple[Profile, Tracks]:
    """Profile a given step; ``case`` describes it in the result."""
    embedding: torch.Tensor = model.embed.weight  # type: ignore[union-attr, assignment]
    dtype = str(embedding.dtype).removeprefix("torch.")
    if embedding.is_cuda:
        return _profile_gpu(fuse_model(model), step, case, roofline, dtype)
    return _profile_cpu(model, step, case, roofline, dtype)


def make_profile_step(engine_core: Any, case: ProfileCase) -> Step:
    """Make the step on the engine core's own pages."""
    decode = case.phase == "decode"
    new, context = (1, case.prompt + 1) if decode else (case.prompt, case.prompt)
    if context > engine_core.max_model_len:
        raise UsageError(
            f"--prompt {case.prompt} is too long: the engine supports "
            f"{engine_core.max_model_len} tokens"
        )
    if not decode and case.batch * new > engine_core.config.max_num_batched_tokens:
        raise UsageError(
            f"{case.batch} prompts of {new} tokens do not fit one step: lower --batch or --prompt, "
            "or raise "
            f"--max-num-batched-tokens ({engine_core.config.max_num_batched_tokens})"
        )
    pages = case.batch * -(-context // engine_core.page_size)
    if pages > engine_core.num_pages:
        capacity = engine_core.num_pages * engine_core.page_size
        raise CapacityError(
            f"{case.batch} x {context} tokens do not fit: the KV cache holds {capacity}; "
            "lower --batch"
        )
    max_context = -(-engine_core.max_model_len // engine_core.page_size) * engine_core.page_size
    graph = decode and engine_core.model_runner.decode_graphs is not None
    bound = min(context_bucket(context), max(max_context, context)) if graph else context
    return synthetic_step(
        engine_core.model,
        engine_core.ops,
        (case.batch, new, context),
        max_context=bound,
        kv=engine_core.model_runner.kv,
    )


def _profile_gpu(
    model: nn.Module, step: Step, case: ProfileCase, roofline: RooflineCeilings, dtype: str
) -> tuple[Profile, Tracks]:
    def launch(traced_step: Step) -> torch.Tensor:
        return traced_step.ops.argmax(model(traced_step))

    with trace_ops(model, step.ops) as cost_trace:
        launch(replace(step, ops=cost_trace.ops))
    run: Callable[[], Any] = lambda: launch(step)  # noqa: E731
    how = "launched"
    if case.phase == "decode":
        try:
            run, how = timing.capture_graph(run), "graph"
        except RuntimeError:  # an op synchronizes with the host
            torch.cuda.synchronize()
    with trace_ops(model, step.ops, torch.profiler.record_function, with_cost=False) as label_trace:
        python_kernels = kernels_from_events(
            record_profiler_events(lambda: launch(replace(step, ops=label_trace.ops)))
        )
    seconds = timing.time_interleaved(
        [run], TIMING_ROUNDS, REPLAYS_PER_SAMPLE if how == "graph" else 1, "cuda"
    )[0]
    runs = split_kernels_by_run(
        kernels_from_events(record_profiler_events(lambda: [run() for _ in range(PROFILED_RUNS)])),
        PROFILED_RUNS,
    )
    kernels = median_run(
        [with_gap_and_added_times(label_graph_kernels(python_kernels, each)) for each in runs]
    )
    costs = costs_by_call(cost_trace.calls)
    lines = kernel_lines(kernels, costs, roofline, dtype)
    profile = Profile(
        case.phase, case.batch, case.prompt, how,
        step_us=MeasurementStats.from_values([each * 1e6 for each in seconds]),
        seen_us=kernels_elapsed_us(kernels),
        gap_us=sum(each.gap_us for each in kernels),
        floor_us=roofline_step_us(costs.values(), roofline, dtype),
        lines=tuple(lines),
    )  # fmt: skip
    return profile, gpu_trace_tracks(kernels, costs)


def _profile_cpu(
    model: nn.Module, step: Step, case: ProfileCase, roofline: RooflineCeilings, dtype: str
) -> tuple[Profile, Tracks]:
    fused = fuse_model(model)
    with trace_ops(fused, step.ops) as cost_trace:
        fused(replace(step, ops=cost_trace.ops))
    costs = costs_by_call(cost_trace.calls)
    seconds, runs = _time_and_trace_runs(fused, step)
    lines = op_lines(runs, costs, roofline, dtype)
    inside: list[ProfileLine] = []
    if any(key[1] == "decode" for key in costs):
        with trace_ops(model, step.ops) as cost_trace:
            model(replace(step, ops=cost_trace.ops))
        inside = op_lines(
            _time_and_trace_runs(model, step)[1], costs_by_call(cost_trace.calls), roofline, dtype
        )
    step_us = MeasurementStats.from_values([each * 1e6 for each in seconds])
    ops_us = sum(line.us for line in lines)
    gap = max(0.0, step_us.median - ops_us)
    profile = Profile(
        case.phase, case.batch, case.prompt, "host", step_us=step_us, seen_us=ops_us + gap,
        gap_us=gap,
        floor_us=roofline_step_us(costs.values(), roofline, dtype),
        lines=tuple(sort_and_add_shares(lines, ops_us + gap)),
        inside=tuple(inside),
    )  # fmt: skip
    return profile, cpu_trace_tracks(runs[-1])


def _time_and_trace_runs(
    model: nn.Module, step: Step
) -> tuple[list[float], list[list[TraceSlice]]]:
    """Return the seconds of the plain step and the slices of the traced step, in turn."""
    seconds, runs = [], []
    for number in range(-CPU_WARMUP_ROUNDS, CPU_ROUNDS):
        step_seconds = timing.time_interleaved([lambda: model(step)], 1)[0][0]
        with trace_ops(model, step.ops, with_cost=False) as trace:
            model(replace(step, ops=trace.ops))
        if number >= 0:
            seconds.append(step_seconds)
            runs.append(trace.slices)
    return seconds, runs
