"""What ``make bench`` measures on a device: the shapes and batches that fit, and what does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.figure_statistics import LONG
from benchmarks.model_shapes import SHAPES, ShapeCost, shape_cost
from benchmarks.workloads import Workload

GIB = 1 << 30
DECODE = ((1, 128), (1, 1024), (1, 4096), (8, 1024), (32, 1024), (64, 128), (64, 1024), (256, 128))
FIRST = (128, 512, 1024, 4096)
CPU_DECODE, CPU_FIRST = ((1, 16), (1, 512)), (512,)
GPU_SHAPES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen-7b", "llama-3-8b")
"""From which a GPU gets the smallest and the largest that fit, unless shapes are named."""
CPU_SHAPE = "smollm2-135m"
WORKSPACE_BYTES = 3 * GIB
"""For activations, CUDA graphs, and the CUDA context and libraries of a process."""


class Skipped(NamedTuple):
    """A shape or a work that does not fit, and why."""

    name: str
    reason: str


class ShapePlan(NamedTuple):
    """A shape and its works that fit."""

    shape: str
    works: Sequence[Workload]


def works_for_gpu() -> Iterator[Workload]:
    """Decode and first tokens, by name as in ``benchmarks/table.py``."""
    yield from _works(DECODE, FIRST)


def works_for_cpu() -> Iterator[Workload]:
    """The same at the sizes that a small model on a CPU is used with."""
    yield from _works(CPU_DECODE, CPU_FIRST)


def _works(decode: Sequence[tuple[int, int]], first: Sequence[int]) -> Iterator[Workload]:
    for batch, prompt in decode:
        yield Workload(f"decode-{batch}x{prompt}", (prompt,) * batch)
    for prompt in first:
        yield Workload(f"first-{prompt}", (prompt,), (1,))


def needed_bytes(cost: ShapeCost, work: Workload) -> int:
    """Weights, keys and values of a work, and workspace, in 16 bits."""
    tokens = sum(prompt + (LONG if len(work.outputs) > 1 else 1) for prompt in work.prompts)
    return cost.weight_bytes + tokens * cost.kv_bytes + WORKSPACE_BYTES


def plan_works(
    shape: str, available_bytes: float, only: Sequence[str] | None = None
) -> tuple[ShapePlan | None, list[Skipped]]:
    """A shape's works within ``available_bytes``, of one side; None where no work fits.

    only: names of works; None: all.
    """
    cost = shape_cost(SHAPES[shape])
    works, skipped = [], []
    for work in works_for_gpu():
        if only and work.name not in only:
            continue
        needed = needed_bytes(cost, work)
        if needed <= available_bytes:
            works.append(work)
        else:
            reason = f"needs {needed / GIB:.1f} GiB, a side has {available_bytes / GIB:.1f} GiB"
            skipped.append(Skipped(f"{shape} {work.name}", reason))
    if works:
        return ShapePlan(shape, works), skipped
    smallest = min(needed_bytes(cost, work) for work in works_for_gpu())
    reason = f"needs {smallest / GIB:.1f} GiB, a side has {available_bytes / GIB:.1f} GiB"
    return None, [Skipped(shape, reason)]


def plan_gpu(
    memory_bytes: float, share: float, shapes: Sequence[str] = (), only: Sequence[str] | None = None
) -> tuple[list[ShapePlan], list[Skipped]]:
    """Plan a GPU whose sides have ``share`` of its memory each.

    Args:
        memory_bytes: of the GPU.
        share: of a side.
        shapes: instead of the smallest and the largest that fit.
        only: names of works; None: all.
    """
    plans, skipped = [], []
    for shape in shapes or GPU_SHAPES:
        plan, left_out = plan_works(shape, memory_bytes * share, only)
        skipped += left_out if plan is None or shapes else []
        plans += [(plan, left_out)] if plan is not None else []
    chosen = plans if shapes or len(plans) < 3 else [plans[0], plans[-1]]
    if not shapes:
        skipped += [each for _, left_out in chosen for each in left_out]
    return [plan for plan, _ in chosen], skipped
