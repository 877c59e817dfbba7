"""The host's part of a step, on a driver that launches nothing."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def _triton() -> str:
    """Its version, without importing it: whether it interprets is decided then, by
    tests/ops/conftest.py.
    """
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or sys.platform != "linux" or not _triton().startswith("3.6."),
    reason="gcc on Linux and Triton 3.6 are not here",
)


@pytest.mark.slow
def test_a_step_is_timed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODELMILL_FAKE_CUDA_DRIVER", raising=False)
    root = Path(__file__).parents[2]
    steps = "64,64+40"  # 40 answers: more tiles of queries than the fake GPU has multiprocessors
    command = [sys.executable, "benchmarks/host_overhead.py", "--steps", steps, "--rounds", "3"]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    matches = re.findall(
        r"smoothquant, pages auto, (\S+) tokens: (\S+) ms of CPU at least, (\S+) in the",
        done.stdout,
    )
    assert [each[0] for each in matches] == steps.split(",")
    assert all(0 < float(least) <= float(median) for _, least, median in matches)
