"""Memory and processors that this process may use: the machine's, or what a container or a
service's limit leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

MIN_PREFIX_CACHE_BYTES = 1 << 30
PROC_CGROUP, CGROUP_MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class MemoryInfo(NamedTuple):
    """Bytes in all, and those that may still be taken."""

    total: int
    free: int


class _CgroupFiles(NamedTuple):
    """What a control group calls its limit, its use, and the parts of its use that are pages of
    files.
    """

    limit: str
    used: str
    inactive_file_keys: tuple[str, str]


_CGROUP_V1 = _CgroupFiles(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_CGROUP_V2 = _CgroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_memory(groups: Path = PROC_CGROUP, mount: Path = CGROUP_MOUNT) -> MemoryInfo:
    """Of the machine, or of the tightest control group that this process is in (Linux, both
    versions).

    The system ends a process whose group takes more than its limit, without a word and however much
    the machine has."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit, used in cgroup_limits(groups, mount):
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return MemoryInfo(total, free)


def prefix_cache_bytes(kv_bytes: int) -> int:
    """What kept prefixes may take of a KV cache in RAM whose size follows from the memory that is
    free.

    Pages in RAM take memory when they are first written. Kept to the last one, prefixes would take
    all of it in time, however few answers run; so they are given a part, enough for the
    conversations that are being had.
    """
    return min(kv_bytes, max(kv_bytes // 3, MIN_PREFIX_CACHE_BYTES))


def cgroup_limits(
    groups: Path = PROC_CGROUP, mount: Path = CGROUP_MOUNT
) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each control group with a limit; a group is bound by those above
    it, too.

    groups: as /proc/self/cgroup. mount: where control groups are seen.
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
            for folder in _self_and_parents(base, path):
                limit, used = _read_int(folder / files.limit), _read_int(folder / files.used)
                if limit is not None and used is not None:
                    yield limit, max(used - _inactive_file_bytes(folder, files), 0)


def cpu_quota(groups: Path = PROC_CGROUP, mount: Path = CGROUP_MOUNT) -> float:
    """Processors whose time the tightest control group's quota pays for; infinity where there is
    none.

    A process with more threads than that is stopped, all threads at once, for the rest of each
    period.
    """
    quotas = [math.inf]
    for line in _read_text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += [
                _parse_quota(_read_text(folder / "cpu.max").split())
                for base in (mount, mount / "unified")
                for folder in _self_and_parents(base, path)
            ]
        elif "cpu" in controllers.split(","):
            for folder in (
                each
                for base in (mount / "cpu", mount / controllers)
                for each in _self_and_parents(base, path)
            ):
                quotas.append(
                    _parse_quota(
                        [
                            _read_text(folder / f"cpu.cfs_{name}_us").strip()
                            for name in ("quota", "period")
                        ]
                    )
                )
    return min(quotas)


def _parse_quota(text: list[str]) -> float:
    """Of "quota period" in microseconds; "max" and −1 are none."""
    if len(text) == 2 and text[0].isdigit() and text[1].isdigit() and int(text[1]):
        return int(text[0]) / int(text[1])
    return math.inf


def _self_and_parents(base: Path, path: str) -> Iterator[Path]:
    """Folders of a group and of those above it.

    From within a container the way there may not be seen, its end is.
    """
    parts = PurePosixPath(path).parts[1:]
    parts = () if ".." in parts else parts
    for count in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:count])


def _inactive_file_bytes(folder: Path, files: _CgroupFiles) -> int:
    stat = dict(line.split(maxsplit=1) for line in _read_text(folder / "memory.stat").splitlines())
    # also those that were read twice, as a checkpoint is by its build: the system takes them back
    # before it ends anyone
    return sum(int(stat.get(name, 0)) for name in files.inactive_file_keys)


def _read_int(path: Path) -> int | None:
    """None where there is no such file or no limit ("max")."""
    text = _read_text(path).strip()
    return int(text) if text.isdigit() else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
