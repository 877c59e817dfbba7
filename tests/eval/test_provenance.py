"""Where a row comes from: the commit and the machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from modelmill.eval import provenance as provenance_module
from modelmill.eval.provenance import git_commit, host_and_gpu_info, provenance


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_checkout_with_changes_is_called_dirty(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    results = tmp_path / "benchmarks/results/cpu.jsonl"
    results.parent.mkdir(parents=True)
    results.write_text("{}")
    git(tmp_path, "add", "a", "benchmarks")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert git_commit(tmp_path) == commit
    (tmp_path / "untracked").touch()
    results.write_text("{}\n{}")
    assert git_commit(tmp_path) == commit, "a row that was appended is no other code"
    (tmp_path / "a").write_text("2")
    assert git_commit(tmp_path) == f"{commit}-dirty"
    assert git_commit(tmp_path, written="a*") == f"{commit}-dirty", "the rows are another's"
    git(tmp_path, "checkout", "benchmarks")
    assert git_commit(tmp_path, written="a*") == commit


def test_no_checkout_and_a_named_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "site-packages").mkdir()
    assert git_commit(tmp_path / "site-packages") is None, "the checkout of something else"
    monkeypatch.setenv("MODELMILL_COMMIT", "abc123")
    provenance_module._running_commit.cache_clear()
    assert git_commit(tmp_path) == "abc123"
    assert provenance()["commit"] == "abc123"
    provenance_module._running_commit.cache_clear()


def test_the_host_is_named_with_its_load() -> None:
    facts = host_and_gpu_info()
    assert facts["host_cpu"]
    assert facts["host_cores"] >= 1
    assert facts["load_1m"] >= 0


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\nflags\t\t: avx2\n", "avx2 avx512f avx512_vnni"),
        ("Features\t: fp asimd sve sve2\n", "asimd sve"),
        ("model name\t: x\n", ""),
    ],
)
def test_instructions_tell_processors_of_one_name_apart(
    tmp_path: Path, text: str, flags: str
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(text)
    assert provenance_module.simd_flags(info) == flags.split()
    assert provenance_module.simd_flags(tmp_path / "absent") == []


@pytest.mark.parametrize(("visible", "card"), [(None, "GPU-0"), ("1", "GPU-1"), ("1,0", "GPU-1")])
def test_the_card_is_the_first_visible_one(
    visible: str | None, card: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -i ] && exec echo "GPU-$2, 580.1, 700.00 W"\n'
        'echo "GPU-0, 580.1, 700.00 W"; echo "GPU-1, 580.1, 700.00 W"\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    provenance_module._first_gpu_info.cache_clear()
    assert host_and_gpu_info()["device_id"] == card
    provenance_module._first_gpu_info.cache_clear()
