"""Memory and CPUs that this process may use, with the limits of control groups (containers)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

MIN_PREFIX_CACHE_BYTES = 1 << 30
PROC_CGROUP, CGROUP_MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class MemoryInfo(NamedTuple):
    """Total bytes, and bytes that are still free."""

    total: int
    free: int


class _CgroupMemoryFiles(NamedTuple):
    """A control group's files for limit and usage, and the memory.stat keys of its page cache."""

    limit: str
    used: str
    page_cache_keys: tuple[str, str]


_CGROUP_V1 = _CgroupMemoryFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_CGROUP_V2 = _CgroupMemoryFiles("memory.max", "memory.current", ("inactive_file", "active_file"))


def read_memory_info(groups: Path = PROC_CGROUP, mount: Path = CGROUP_MOUNT) -> MemoryInfo:
    """Return the memory of the machine, or of this process's tightest control group.

    Linux, control groups version 1 and 2. The kernel kills a process whose group exceeds its limit,
    without a message, even if the machine has free memory.
    """
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in iter_cgroup_memory_limit_and_usage(groups, mount):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return MemoryInfo(total, free)


def max_cached_prefix_bytes(kv_bytes: int) -> int:
    """Return the bytes that cached prefixes may take of a KV cache in RAM sized by free memory.

    Pages in RAM take memory when they are first written. Without a limit, cached prefixes would
    fill all of it over time, even with few running requests.
    """
    return min(kv_bytes, max(kv_bytes // 3, MIN_PREFIX_CACHE_BYTES))


def iter_cgroup_memory_limit_and_usage(
    groups: Path = PROC_CGROUP, mount: Path = CGROUP_MOUNT
) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of each control group with a limit, parent groups included.

    Args:
        groups: a file like /proc/self/cgroup.
        mount: where the control groups are mounted.
    """
    for line in _read_text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases, files = [mount, mount / "unified"], _CGROUP_V2
        elif "memory" in controllers.split(","):
            bases, files = [mount / "memory"], _CGROUP_V1
        else:
            continue
        for base in bases:
            for folder in _cgroup_and_parents(base, path):
                limit, used = _read_int(folder / files.limit), _read_int(folder / files.used)
                if limit is not None and used is not None:
                    yield limit, max(used - _cgroup_page_cache_bytes(folder, files), 0)


def cgroup_cpu_quota(groups: Path = PROC_CGROUP, mount: Path = CGROUP_MOUNT) -> float:
    """Return the CPU quota of the tightest control group in CPUs; infinity without a quota.

    If a process runs more threads than that, all of them are stopped for the rest of each period.
    """
    quotas = [math.inf]
    for line in _read_text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += [
                _parse_cpu_quota(_read_text(folder / "cpu.max").split())
                for base in (mount, mount / "unified")
                for folder in _cgroup_and_parents(base, path)
            ]
        elif "cpu" in controllers.split(","):
            for folder in (
                each
                for base in (mount / "cpu", mount / controllers)
                for each in _cgroup_and_parents(base, path)
            ):
                quotas.append(
                    _parse_cpu_quota(
                        [
                            _read_text(folder / f"cpu.cfs_{name}_us").strip()
                            for name in ("quota", "period")
                        ]
                    )
                )
    return min(quotas)


def _parse_cpu_quota(text: list[str]) -> float:
    """Parse "quota period" in microseconds; "max" and −1 mean no quota."""
    if len(text) == 2 and text[0].isdigit() and text[1].isdigit() and int(text[1]):
        return int(text[0]) / int(text[1])
    return math.inf


def _cgroup_and_parents(base: Path, path: str) -> Iterator[Path]:
    """Yield the folders of a group and of its parents.

    Within a container the full path may be missing while the mount itself is visible.
    """
    parts = PurePosixPath(path).parts[1:]
    parts = () if ".." in parts else parts
    for count in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:count])


def _cgroup_page_cache_bytes(folder: Path, files: _CgroupMemoryFiles) -> int:
    stat = dict(line.split(maxsplit=1) for line in _read_text(folder / "memory.stat").splitlines())
    # active pages too (a build reads a checkpoint twice): the kernel frees them before it kills
    return sum(int(stat.get(name, 0)) for name in files.page_cache_keys)


def _read_int(path: Path) -> int | None:
    """Read an integer; None if there is no such file or no limit ("max")."""
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
