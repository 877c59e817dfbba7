"""How many CPU threads to compute with."""

from __future__ import annotations

import os

import psutil
import torch


def use_threads(wanted: int | None) -> int:
    """Set torch's threads to ``wanted``, or to the physical cores that this process may use; returns the number."""
    count = wanted if wanted is not None else available_cores()
    torch.set_num_threads(count)
    return count


def available_cores() -> int:
    """Physical cores, no more than the process is allowed to run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical))
