"""``CachedLauncher`` compared with Triton's own launch on a fake driver that records its arguments.

Kernel and launcher are compiled as for a Hopper GPU.
"""

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
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    env = fake_cuda_driver.driver_environment(tmp_path_factory.mktemp("silent"))
    command = [sys.executable, "-m", "tests.ops.fake_cuda_driver.launches"]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


def test_the_kernel_is_launched_by_its_own_launcher(launches: dict[str, Any]) -> None:
    assert launches["compiled_launches"] == ["direct"]
    assert [each["launches"] for each in launches["cached"]] == [1, 2, 3]
    assert {each["stream"] for each in launches["cached"]} == {launches["stream"]}


def test_addresses_and_numbers_are_those_that_triton_gives(launches: dict[str, Any]) -> None:
    for actual, expected in zip(launches["cached"], launches["triton"], strict=True):
        assert actual["x"] == actual["words"][0] == expected["words"][0]
        assert actual["values"] == actual["words"][3]
        assert actual["rows"] == actual["words"][9]
        assert actual["words"][9:] == expected["words"][9:], "numbers, and no memory of its own"
        for name in ("function", "stream", "sizes"):
            assert actual[name] == expected[name]
