"""Provenance of a result row: the commit, the GPU and its host."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from modelmill.core.env import first_visible_gpu, option_from_env

CHECKOUT_ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS_FOLDER = "benchmarks/results"
CPUINFO = Path("/proc/cpuinfo")
SIMD_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "asimd",
    "sve",
)  # fmt: skip
"""Instructions that decide which kernels run, as Linux names them in /proc/cpuinfo."""


def provenance() -> dict[str, Any]:
    """Return what every row carries: ``commit``, and the facts of ``host_and_gpu_info``."""
    return {"commit": _running_commit(), **host_and_gpu_info()}


@cache
def _running_commit() -> str | None:
    """The commit of the code of this process, read once: rows are written between timings."""
    return git_commit()


def git_commit(root: Path = CHECKOUT_ROOT, written: str = RESULTS_FOLDER) -> str | None:
    """Return the commit, with "-dirty" behind it if tracked files differ.

    Files that the measurement itself wrote are no difference: the next one measures the same code.
    MODELMILL_COMMIT names it where the code is no checkout; None without both.

    written: these files, as a pattern of git's; the rows that a benchmark appended.
    """
    if named := option_from_env("commit"):
        return named
    # an installed package may lie inside a checkout of something else
    if not (root / ".git").exists():
        return None
    commit = _command_output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    if commit is None:
        return None
    changed = ["status", "--porcelain", "-uno", "--", ".", f":(exclude){written}"]
    return f"{commit}-dirty" if _command_output(["git", "-C", str(root), *changed]) else commit


def host_and_gpu_info() -> dict[str, Any]:
    """Return the processor's name and SIMD instructions, its cores, the load, the ids of GPUs.

    Cloud machines with one name ("AMD EPYC") differ in their instructions.
    """
    facts: dict[str, Any] = {
        "host_cpu": _cpuinfo_line("model name") or platform.processor() or platform.machine(),
        "host_simd": simd_flags(),
        "host_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
    }
    return facts | _first_gpu_info()


@cache
def _first_gpu_info() -> dict[str, Any]:
    """The first visible GPU's id, driver and power limit, read once; nothing without a GPU."""
    # nvidia-smi lists every GPU of the machine, also those that this process may not use
    first = first_visible_gpu()
    selection = ["-i", first] if first else []
    query = ["--query-gpu=uuid,driver_version,power.limit", "--format=csv,noheader"]
    gpus = _command_output(["nvidia-smi", *selection, *query])
    if not gpus:
        return {}
    uuid, driver, limit = (part.strip() for part in gpus.splitlines()[0].split(","))
    return {"device_id": uuid, "driver": driver, "power_limit": limit}


def simd_flags(info: Path = CPUINFO) -> list[str]:
    """Return those of ``SIMD_FLAGS`` that the processor has; none where Linux does not tell."""
    flags = (_cpuinfo_line("flags", info) or _cpuinfo_line("Features", info)).split()
    return [name for name in SIMD_FLAGS if name in flags]


def _cpuinfo_line(name: str, info: Path = CPUINFO) -> str:
    """The first processor's line of that name in /proc/cpuinfo; empty without it."""
    try:
        lines = info.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _command_output(command: list[str]) -> str | None:
    """What a command prints; None where there is no such command, or it fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
