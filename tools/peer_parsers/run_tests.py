"""Runs a peer's tests in a process of their own; returns what became of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.peer_parsers import pytest_plugin, run_pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Peer:
    """Where a peer has its tests of parsers.

    Attributes:
        title: its name.
        package: folder of its package, below the checkout.
        tests: files and folders of tests, below the checkout.
        conftest_folder: no conftest.py outside it is read; others need the whole peer.
    """

    title: str
    package: str
    tests: tuple[str, ...]
    conftest_folder: str


PEERS = {
    "vllm": Peer(
        "vLLM",
        "vllm",
        ("tests/tool_parsers", "tests/tool_use/test_kimi_k3_tool_parser.py"),
        "tests/tool_parsers",
    ),
    "sglang": Peer(
        "SGLang",
        "python/sglang",
        ("test/registered/unit/function_call", "test/registered/function_call"),
        "test",
    ),
}


def run_tests(name: str, checkout: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return outcome, message and asked answers by test.

    Args:
        name: of the peer.
        checkout: folder of the peer's repository.

    Raises:
        FileNotFoundError: the folder has no tests of the peer.
    """
    peer = PEERS[name]
    tests = [test for test in peer.tests if (checkout / test).exists()]
    if not tests:
        raise FileNotFoundError(
            f"{checkout} has none of {', '.join(peer.tests)}; name a checkout of {peer.title}"
        )
    inside = [test for test in tests if Path(test).is_relative_to(peer.conftest_folder)]
    outside = [test for test in tests if test not in inside]
    outcomes: dict[str, dict[str, Any]] = {}
    if inside:
        outcomes |= _run(name, checkout, ["--confcutdir", peer.conftest_folder, *inside])
    if outside:
        outcomes |= _run(name, checkout, ["--noconftest", *outside])
    return outcomes


def _run(name: str, checkout: Path, arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Return outcome, message and asked answers by test of one run of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcomes.json"
        subprocess.run(
            _command(checkout, arguments),
            cwd=ROOT,
            env=_environment(name, checkout / PEERS[name].package, output),
            timeout=TIMEOUT_SECONDS,
            check=False,  # tests fail: that is what is counted
        )
        outcomes: dict[str, dict[str, Any]] = json.loads(output.read_text("utf-8"))
    return outcomes


def _command(checkout: Path, arguments: list[str]) -> list[str]:
    options = "-q --tb=no -rN --no-header -W ignore --import-mode=importlib"
    options += " --continue-on-collection-errors -p no:cacheprovider --rootdir . -c"
    return [
        *(sys.executable, "-m", run_pytest.__name__, str(checkout.resolve())),
        *(*options.split(), os.devnull, *arguments),
    ]


def _environment(name: str, package: Path, output: Path) -> dict[str, str]:
    return {
        **os.environ,
        pytest_plugin.ROOT_KEY: name,
        pytest_plugin.SOURCE_KEY: str(package.resolve()),
        pytest_plugin.OUTPUT_KEY: str(output),
    }
