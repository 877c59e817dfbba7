"""Selects the device and the number of CPU threads."""

from __future__ import annotations

import math
import os

import psutil
import torch

from modelmill.core import memory_limits
from modelmill.core.errors import MissingDependency, UsageError
from modelmill.core.progress_callback import Progress
from modelmill.ops.cpu.common import build as kernels
from modelmill.ops.cpu.common import openmp


def resolve_device(name: str) -> str:
    """Resolve a device name; "auto" is the first GPU, or the CPU if there is none.

    Raises:
        UsageError: The name is not one of auto, cpu, cuda, cuda:N.
        MissingDependency: There is no such GPU.
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
"""Stage name that ``ensure_cpu_kernels_compiled`` reports."""


def ensure_cpu_kernels_compiled(name: str, on_progress: Progress) -> None:
    """Compile the CPU kernels if device ``name`` is a CPU and this machine has none yet.

    Raises what ``resolve_device`` raises. ``on_progress``: called with (stage, done, total).
    """
    loaded = getattr(kernels.load_or_compile_library, "cache_info", None)
    if (
        resolve_device(name) == "cpu"
        and not (loaded is not None and loaded().currsize)
        and kernels.needs_compile()
    ):
        on_progress(COMPILING_STAGE, 0, 1)
        kernels.load_or_compile_library()


def rank_devices(first: str, count: int) -> list[str]:
    """``count`` devices from ``first`` on, one per rank.

    Raises MissingDependency if there are fewer GPUs.
    """
    if first == "cpu":
        return ["cpu"] * count
    start, num_gpus = torch.device(first).index or 0, torch.cuda.device_count()
    if start + count > num_gpus:
        raise MissingDependency(
            f"--tp {count} needs {count} GPUs from {first} on, this torch sees {num_gpus - start}; "
            "lower --tp"
        )
    return [f"cuda:{i}" for i in range(start, start + count)]


def set_cpu_threads(num_threads: int | None, ranks: int = 1) -> int:
    """Set torch's CPU threads and return their number.

    Args:
        num_threads: None: the physical cores that this process may use.
        ranks: Ranks on this CPU, which share the threads.
    """
    count = max((num_threads if num_threads is not None else available_cores()) // ranks, 1)
    torch.set_num_threads(count)
    openmp.limit_spin_wait()
    return count


def available_cores() -> int:
    """Physical cores, limited by the process's CPU affinity and its cgroup quota."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )
    physical = psutil.cpu_count(logical=False) or allowed
    quota = memory_limits.cgroup_cpu_quota()
    return max(1, min(allowed, physical, allowed if math.isinf(quota) else math.ceil(quota)))
