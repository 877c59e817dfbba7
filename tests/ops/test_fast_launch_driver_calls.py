"""``CachedLauncher`` beside Triton's own way to launch, on a driver that keeps what it is told: the
same launch, argument by argument. Kernel and launcher are compiled as on a Hopper GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fake_cuda_driver

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None
    or sys.platform != "linux"
    or not triton.__version__.startswith("3.6."),
    reason="gcc on Linux and Triton 3.6, whose launcher is called, are not here",
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    env = fake_cuda_driver.driver_environment(tmp_path_factory.mktemp("silent"))
    command = [sys.executable, "-m", "tests.ops.fake_cuda_driver.launches"]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


def test_the_kernel_is_launched_by_its_own_launcher(told: dict[str, Any]) -> None:
    assert told["compiled_launches"] == ["direct"]
    assert [each["launches"] for each in told["cached"]] == [1, 2, 3]
    assert {each["stream"] for each in told["cached"]} == {told["stream"]}


def test_addresses_and_numbers_are_those_that_triton_gives(told: dict[str, Any]) -> None:
    for mine, right in zip(told["cached"], told["triton"], strict=True):
        assert mine["x"] == mine["words"][0] == right["words"][0]
        assert mine["values"] == mine["words"][3]
        assert mine["rows"] == mine["words"][9]
        assert mine["words"][9:] == right["words"][9:], "numbers, and no memory of its own"
        for name in ("function", "stream", "sizes"):
            assert mine[name] == right[name]
