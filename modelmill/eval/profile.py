"""Where the time of one step goes: kernel by kernel on a GPU, op by op on a CPU, each against its floor.

The step is the engine's own (its weights, its pages, its ops, its graph); its sequences are of one length, with random
ids and random pages. Floors are counts (``counts``) over what was measured of the device in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from modelmill.core.errors import CapacityError, UsageError
from modelmill.eval import chrome
from modelmill.eval.ceilings import Ceilings
from modelmill.eval.kernels import kernels_of, parts, timeline, told_by, traced
from modelmill.eval.profile_lines import (
    Line,
    counts_of,
    cpu_events,
    gpu_events,
    kernel_lines,
    median_run,
    op_lines,
    shared,
    span,
    step_floor,
)
from modelmill.eval.report import Spread
from modelmill.eval.watch import Slice, watching
from modelmill.nn.step import Step
from modelmill.nn.trial import trial_step
from modelmill.ops import clock
from modelmill.runtime.graph import bucket

Tracks = dict[str, list[chrome.Event]]
PHASES = ("decode", "prefill")
ROUNDS, QUEUED, REPLAYS = 15, 4, 3
CPU_ROUNDS, CPU_WARM = 7, 2


@dataclass(frozen=True)
class Profile:
    """One phase. step_us: without the profiler. seen_us: the step that the lines are of. gap_us: nothing ran meanwhile.

    floor_us: weights, keys and values once, or the operations, whichever takes longer. how: graph, launched (by Python)
    or host (a CPU). inside: of an op that spans others, what those take when they run one by one.
    """

    phase: str
    batch: int
    prompt: int
    how: str
    step_us: Spread
    seen_us: float
    gap_us: float
    floor_us: float
    lines: tuple[Line, ...]
    inside: tuple[Line, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class Work:
    """What is profiled: ``batch`` sequences after a prompt of ``prompt`` tokens, or that prompt itself."""

    phase: str
    batch: int
    prompt: int


@torch.inference_mode()
def profile(loop: Any, work: Work, ceilings: Ceilings) -> tuple[Profile, Tracks]:
    """A step of an engine's loop, which must be idle: its pages are overwritten. The events are tracks for a trace.

    Raises UsageError, CapacityError where such a step does not fit the engine.
    """
    return profile_step(loop.model, step_of(loop, work), work, ceilings)


@torch.inference_mode()
def profile_step(model: nn.Module, step: Step, work: Work, ceilings: Ceilings) -> tuple[Profile, Tracks]:
    """The same of a step as it is; ``work`` says what it is called."""
    held: torch.Tensor = model.embed.weight  # type: ignore[union-attr, assignment]
    dtype = str(held.dtype).removeprefix("torch.")
    return (_on_gpu if held.is_cuda else _on_cpu)(model, step, work, ceilings, dtype)


def step_of(loop: Any, work: Work) -> Step:
    """The step, on the loop's own pages."""
    decode = work.phase == "decode"
    new, context = (1, work.prompt + 1) if decode else (work.prompt, work.prompt)
    if context > loop.max_model_len:
        raise UsageError(f"--prompt {work.prompt} is too long: the engine computes {loop.max_model_len} tokens")
    if not decode and work.batch * new > loop.config.max_num_batched_tokens:
        raise UsageError(
            f"{work.batch} prompts of {new} tokens are no single step: lower --batch or --prompt, or raise "
            f"--max-num-batched-tokens ({loop.config.max_num_batched_tokens})"
        )
    pages = work.batch * -(-context // loop.page_size)
    if pages > loop.num_pages:
        held = loop.num_pages * loop.page_size
        raise CapacityError(f"{work.batch} x {context} tokens do not fit: the KV cache holds {held}; lower --batch")
    longest = -(-loop.max_model_len // loop.page_size) * loop.page_size
    graph = decode and loop.runner.graphs is not None
    bound = min(bucket(context), max(longest, context)) if graph else context
    return trial_step(loop.model, loop.ops, (work.batch, new, context), bound=bound, kv=loop.runner.kv)


def _on_gpu(model: nn.Module, step: Step, work: Work, ceilings: Ceilings, dtype: str) -> tuple[Profile, Tracks]:
    def launch(given: Step) -> torch.Tensor:
        return given.ops.argmax(model(given))

    with watching(model, step.ops) as counted:
        launch(replace(step, ops=counted.ops))
    run: Callable[[], Any] = lambda: launch(step)  # noqa: E731
    how = "launched"
    if work.phase == "decode":
        try:
            run, how = clock.recorded(run), "graph"
        except RuntimeError:  # an op that waits for the host
            torch.cuda.synchronize()
    with watching(model, step.ops, torch.profiler.record_function, counted=False) as labelled:
        known = kernels_of(traced(lambda: launch(replace(step, ops=labelled.ops))))
    seconds = clock.in_turn([run], ROUNDS, QUEUED if how == "graph" else 1, "cuda")[0]
    runs = parts(kernels_of(traced(lambda: [run() for _ in range(REPLAYS)])), REPLAYS)
    kernels = median_run([timeline(told_by(known, each)) for each in runs])
    counts = counts_of(counted.calls)
    lines = kernel_lines(kernels, counts, ceilings, dtype)
    found = Profile(
        work.phase, work.batch, work.prompt, how,
        step_us=Spread.of([each * 1e6 for each in seconds]),
        seen_us=span(kernels),
        gap_us=sum(each.gap for each in kernels),
        floor_us=step_floor(counts.values(), ceilings, dtype),
        lines=tuple(lines),
    )  # fmt: skip
    return found, gpu_events(kernels, counts)


def _on_cpu(model: nn.Module, step: Step, work: Work, ceilings: Ceilings, dtype: str) -> tuple[Profile, Tracks]:
    with watching(model, step.ops) as counted:
        model(replace(step, ops=counted.ops))
    counts = counts_of(counted.calls)
    seconds, runs = _watched_runs(model, step)
    lines = op_lines(runs, counts, ceilings, dtype)
    inside: list[Line] = []
    if any(key[1] == "decode" for key in counts):
        apart = replace(step, whole=False)
        with watching(model, apart.ops) as counted:
            model(replace(apart, ops=counted.ops))
        inside = op_lines(_watched_runs(model, apart)[1], counts_of(counted.calls), ceilings, dtype)
    step_us = Spread.of([each * 1e6 for each in seconds])
    ops_us = sum(line.us for line in lines)
    gap = max(0.0, step_us.median - ops_us)
    found = Profile(
        work.phase, work.batch, work.prompt, "host", step_us=step_us, seen_us=ops_us + gap, gap_us=gap,
        floor_us=step_floor(counts.values(), ceilings, dtype), lines=tuple(shared(lines, ops_us + gap)),
        inside=tuple(inside),
    )  # fmt: skip
    return found, cpu_events(runs[-1])


def _watched_runs(model: nn.Module, step: Step) -> tuple[list[float], list[list[Slice]]]:
    """Seconds of the step as it is, and the slices of as many watched ones, in turn."""
    seconds, runs = [], []
    for number in range(-CPU_WARM, CPU_ROUNDS):
        once = clock.in_turn([lambda: model(step)], 1)[0][0]
        with watching(model, step.ops, counted=False) as seen:
            model(replace(step, ops=seen.ops))
        if number >= 0:
            seconds.append(once)
            runs.append(seen.slices)
    return seconds, runs
