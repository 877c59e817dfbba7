"""Where the time of one step goes: kernel by kernel on a GPU, op by op on a CPU, each against its
floor.

The step is the engine's own (its weights, its pages, its ops, its graph); its sequences are of one
length, with random ids and random pages. Floors are counts (``counts``) over what was measured of
the device in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from modelmill.core.errors import CapacityError, UsageError
from modelmill.eval import chrome_trace
from modelmill.eval.kernel_trace import (
    kernels_from_events,
    label_graph_kernels,
    profile_events,
    split_runs,
    timeline,
)
from modelmill.eval.op_trace import TraceSlice, trace_ops
from modelmill.eval.profile_lines import (
    ProfileLine,
    costs_by_call,
    cpu_events,
    elapsed_us,
    gpu_events,
    kernel_lines,
    median_run,
    min_step_us,
    op_lines,
    with_shares,
)
from modelmill.eval.report import Spread
from modelmill.eval.roofline import Roofline
from modelmill.nn.fusion import fuse
from modelmill.nn.step import Step
from modelmill.nn.synthetic_step import synthetic_step
from modelmill.ops import timing
from modelmill.runtime.decode_graphs import context_bucket

Tracks = dict[str, list[chrome_trace.TraceEvent]]
PHASES = ("decode", "prefill")
ROUNDS, QUEUED_STEPS, GRAPH_REPLAYS = 15, 4, 3
CPU_ROUNDS, CPU_WARMUP_ROUNDS = 7, 2


@dataclass(frozen=True)
class Profile:
    """One phase. step_us: without the profiler. seen_us: the step that the lines are of. gap_us:
    nothing ran meanwhile.

    floor_us: weights, keys and values once, or the operations, whichever takes longer. how: graph,
    launched (by Python) or host (a CPU). inside: of an op that spans others, what those take when
    they run one by one.
    """

    phase: str
    batch: int
    prompt: int
    how: str
    step_us: Spread
    seen_us: float
    gap_us: float
    floor_us: float
    lines: tuple[ProfileLine, ...]
    inside: tuple[ProfileLine, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class ProfileCase:
    """What is profiled: ``batch`` sequences after a prompt of ``prompt`` tokens, or that prompt
    itself.
    """

    phase: str
    batch: int
    prompt: int


@torch.inference_mode()
def profile_case(engine_core: Any, case: ProfileCase, roofline: Roofline) -> tuple[Profile, Tracks]:
    """A step of an engine's loop, which must be idle: its pages are overwritten. The events are
    tracks for a trace.

    Raises UsageError, CapacityError where such a step does not fit the engine.
    """
    return profile_step(engine_core.model, make_step(engine_core, case), case, roofline)


@torch.inference_mode()
def profile_step(
    model: nn.Module, step: Step, case: ProfileCase, roofline: Roofline
) -> tuple[Profile, Tracks]:
    """The same of a step as it is; ``case`` says what it is called."""
    held: torch.Tensor = model.embed.weight  # type: ignore[union-attr, assignment]
    dtype = str(held.dtype).removeprefix("torch.")
    if held.is_cuda:
        return _profile_gpu(fuse(model), step, case, roofline, dtype)
    return _profile_cpu(model, step, case, roofline, dtype)


def make_step(engine_core: Any, case: ProfileCase) -> Step:
    """The step, on the loop's own pages."""
    decode = case.phase == "decode"
    new, context = (1, case.prompt + 1) if decode else (case.prompt, case.prompt)
    if context > engine_core.max_model_len:
        raise UsageError(
            f"--prompt {case.prompt} is too long: the engine computes {engine_core.max_model_len} "
            "tokens"
        )
    if not decode and case.batch * new > engine_core.config.max_num_batched_tokens:
        raise UsageError(
            f"{case.batch} prompts of {new} tokens are no single step: lower --batch or --prompt, "
            "or raise "
            f"--max-num-batched-tokens ({engine_core.config.max_num_batched_tokens})"
        )
    pages = case.batch * -(-context // engine_core.page_size)
    if pages > engine_core.num_pages:
        held = engine_core.num_pages * engine_core.page_size
        raise CapacityError(
            f"{case.batch} x {context} tokens do not fit: the KV cache holds {held}; lower --batch"
        )
    longest = -(-engine_core.max_model_len // engine_core.page_size) * engine_core.page_size
    graph = decode and engine_core.model_runner.decode_graphs is not None
    bound = min(context_bucket(context), max(longest, context)) if graph else context
    return synthetic_step(
        engine_core.model,
        engine_core.ops,
        (case.batch, new, context),
        max_context=bound,
        kv=engine_core.model_runner.kv,
    )


def _profile_gpu(
    model: nn.Module, step: Step, work: ProfileCase, ceilings: Roofline, dtype: str
) -> tuple[Profile, Tracks]:
    def launch(given: Step) -> torch.Tensor:
        return given.ops.argmax(model(given))

    with trace_ops(model, step.ops) as counted:
        launch(replace(step, ops=counted.ops))
    run: Callable[[], Any] = lambda: launch(step)  # noqa: E731
    how = "launched"
    if work.phase == "decode":
        try:
            run, how = timing.capture_graph(run), "graph"
        except RuntimeError:  # an op that waits for the host
            torch.cuda.synchronize()
    with trace_ops(model, step.ops, torch.profiler.record_function, with_cost=False) as labelled:
        known = kernels_from_events(profile_events(lambda: launch(replace(step, ops=labelled.ops))))
    seconds = timing.time_interleaved([run], ROUNDS, QUEUED_STEPS if how == "graph" else 1, "cuda")[
        0
    ]
    runs = split_runs(
        kernels_from_events(profile_events(lambda: [run() for _ in range(GRAPH_REPLAYS)])),
        GRAPH_REPLAYS,
    )
    kernels = median_run([timeline(label_graph_kernels(known, each)) for each in runs])
    counts = costs_by_call(counted.calls)
    lines = kernel_lines(kernels, counts, ceilings, dtype)
    found = Profile(
        work.phase, work.batch, work.prompt, how,
        step_us=Spread.from_values([each * 1e6 for each in seconds]),
        seen_us=elapsed_us(kernels),
        gap_us=sum(each.gap_us for each in kernels),
        floor_us=min_step_us(counts.values(), ceilings, dtype),
        lines=tuple(lines),
    )  # fmt: skip
    return found, gpu_events(kernels, counts)


def _profile_cpu(
    model: nn.Module, step: Step, work: ProfileCase, ceilings: Roofline, dtype: str
) -> tuple[Profile, Tracks]:
    fused = fuse(model)
    with trace_ops(fused, step.ops) as counted:
        fused(replace(step, ops=counted.ops))
    counts = costs_by_call(counted.calls)
    seconds, runs = _traced_runs(fused, step)
    lines = op_lines(runs, counts, ceilings, dtype)
    inside: list[ProfileLine] = []
    if any(key[1] == "decode" for key in counts):
        with trace_ops(model, step.ops) as counted:
            model(replace(step, ops=counted.ops))
        inside = op_lines(
            _traced_runs(model, step)[1], costs_by_call(counted.calls), ceilings, dtype
        )
    step_us = Spread.from_values([each * 1e6 for each in seconds])
    ops_us = sum(line.us for line in lines)
    gap = max(0.0, step_us.median - ops_us)
    found = Profile(
        work.phase, work.batch, work.prompt, "host", step_us=step_us, seen_us=ops_us + gap,
        gap_us=gap,
        floor_us=min_step_us(counts.values(), ceilings, dtype),
        lines=tuple(with_shares(lines, ops_us + gap)),
        inside=tuple(inside),
    )  # fmt: skip
    return found, cpu_events(runs[-1])


def _traced_runs(model: nn.Module, step: Step) -> tuple[list[float], list[list[TraceSlice]]]:
    """Seconds of the step as it is, and the slices of as many watched ones, in turn."""
    seconds, runs = [], []
    for number in range(-CPU_WARMUP_ROUNDS, CPU_ROUNDS):
        once = timing.time_interleaved([lambda: model(step)], 1)[0][0]
        with trace_ops(model, step.ops, with_cost=False) as seen:
            model(replace(step, ops=seen.ops))
        if number >= 0:
            seconds.append(once)
            runs.append(seen.slices)
    return seconds, runs
