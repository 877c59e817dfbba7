"""Limits of control groups, as files of both versions tell them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from modelmill.core.memory_limits import (
    MemoryInfo,
    cgroup_cpu_quota,
    iter_cgroup_memory_limit_and_usage,
    read_memory_info,
)

GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GiB, 48 of them free."""
    host_memory = SimpleNamespace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr("modelmill.core.memory_limits.psutil.virtual_memory", lambda: host_memory)


def put(folder: Path, **files: object) -> None:
    """Files of a group, dots in their names as underscores."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{content}\n")


def memory_of(tmp_path: Path, lines: str) -> MemoryInfo:
    (tmp_path / "cgroup").write_text(lines)
    return read_memory_info(tmp_path / "cgroup", tmp_path / "mount")


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert read_memory_info(tmp_path / "none", tmp_path) == (64 * GIB, 48 * GIB)


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    put(
        tmp_path / "mount",
        memory_max=8 * GIB,
        memory_current=4 * GIB,
        memory_stat=f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\nfile 7",
    )
    assert memory_of(tmp_path, "0::/\n") == (8 * GIB, 6 * GIB), (
        "pages of files are given back when they are wanted"
    )


def test_the_tightest_group_on_the_way_counts(tmp_path: Path) -> None:
    put(tmp_path / "mount/a.slice", memory_max=16 * GIB, memory_current=15 * GIB)
    put(tmp_path / "mount/a.slice/b.service", memory_max="max", memory_current=GIB)
    put(tmp_path / "mount/other", memory_max=GIB, memory_current=0)
    assert memory_of(tmp_path, "0::/a.slice/b.service\n") == (16 * GIB, GIB)


def test_the_first_version(tmp_path: Path) -> None:
    group = tmp_path / "mount/memory/docker/x"
    put(
        group,
        memory_limit_in_bytes=4 * GIB,
        memory_usage_in_bytes=2 * GIB,
        memory_stat=f"total_inactive_file {GIB // 2}",
    )
    put(group.parent.parent, memory_limit_in_bytes=(1 << 63) - 4096, memory_usage_in_bytes=40 * GIB)
    cgroup_lines = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n"
    assert memory_of(tmp_path, cgroup_lines) == (4 * GIB, 2 * GIB + GIB // 2)


def test_where_the_way_is_not_seen_the_end_is(tmp_path: Path) -> None:
    put(tmp_path / "mount/memory", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=3 * GIB)
    assert memory_of(tmp_path, "4:memory:/../../outer\n") == (2 * GIB, 0), "never less than nothing"


def test_a_limit_of_none_is_none(tmp_path: Path) -> None:
    put(tmp_path / "mount", memory_max="max", memory_current=GIB)
    (tmp_path / "cgroup").write_text("0::/\n")
    assert list(iter_cgroup_memory_limit_and_usage(tmp_path / "cgroup", tmp_path / "mount")) == []


def test_a_quota_of_processors_counts(tmp_path: Path) -> None:
    put(tmp_path / "mount/a.slice", cpu_max="150000 100000")
    put(tmp_path / "mount/a.slice/b.service", cpu_max="max 100000")
    (tmp_path / "cgroup").write_text("0::/a.slice/b.service\n")
    assert cgroup_cpu_quota(tmp_path / "cgroup", tmp_path / "mount") == 1.5
    put(tmp_path / "mount/cpu/docker/x", cpu_cfs_quota_us=50000, cpu_cfs_period_us=100000)
    put(tmp_path / "mount/cpu", cpu_cfs_quota_us=-1, cpu_cfs_period_us=100000)
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/docker/x\n0::/\n")
    assert cgroup_cpu_quota(tmp_path / "cgroup", tmp_path / "mount") == 0.5
    assert cgroup_cpu_quota(tmp_path / "none", tmp_path / "mount") == math.inf
