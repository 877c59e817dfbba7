"""Which device, and how many CPU threads to compute with."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import psutil
import torch

from modelmill.core import memory_limits
from modelmill.core.errors import MissingDependency, UsageError
from modelmill.ops.cpu import build as kernels
from modelmill.ops.cpu import openmp


def pick_device(name: str) -> str:
    """ "auto" is the first GPU where there is one.

    Raises UsageError, MissingDependency where it is absent.
    """
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name!r} is not one of cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name!r} is not one of cpu, cuda, cuda:N")
    if device.type == "cuda" and (
        not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
    ):
        raise MissingDependency(f"--device {name}: this torch sees no such GPU; use --device cpu")
    return "cuda:0" if name == "cuda" else name


COMPILING_STAGE = "compiling kernels for this machine, once"
"""The stage that ``compile_cpu_kernels`` reports."""


def compile_cpu_kernels(name: str, on_progress: Callable[[str, int, int], None]) -> None:
    """Have the CPU's kernels compiled where the device is one and this machine has none yet. Raises
    as pick_device.

    on_progress: (stage, done, total), so that who waits knows for what.
    """
    loaded = getattr(kernels.load, "cache_info", None)
    if (
        pick_device(name) == "cpu"
        and not (loaded is not None and loaded().currsize)
        and kernels.needs_compile()
    ):
        on_progress(COMPILING_STAGE, 0, 1)
        kernels.load()


def rank_devices(first: str, count: int) -> list[str]:
    """``count`` devices from ``first`` on, one a rank.

    Raises MissingDependency where there are not so many GPUs.
    """
    if first == "cpu":
        return ["cpu"] * count
    start, there = torch.device(first).index or 0, torch.cuda.device_count()
    if start + count > there:
        raise MissingDependency(
            f"--tp {count} needs {count} GPUs from {first} on, this torch sees {there - start}; "
            "lower --tp"
        )
    return [f"cuda:{i}" for i in range(start, start + count)]


def use_threads(num_threads: int | None, ranks: int = 1) -> int:
    """Set torch's threads to ``num_threads``, or to the physical cores that this process may use;
    returns the number.

    Several ranks on one CPU share them.
    """
    count = max((num_threads if num_threads is not None else available_cores()) // ranks, 1)
    torch.set_num_threads(count)
    openmp.limit_spin_wait()
    return count


def available_cores() -> int:
    """Physical cores, no more than the process may run on and than its control group's quota pays
    for.
    """
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )
    physical = psutil.cpu_count(logical=False) or allowed
    quota = memory_limits.cpu_quota()
    return max(1, min(allowed, physical, allowed if math.isinf(quota) else math.ceil(quota)))
