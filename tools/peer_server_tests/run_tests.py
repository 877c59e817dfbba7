"""Runs llama.cpp's tests in a process of their own; returns what became of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from modelmill.core.config import BuildConfig
from modelmill.llm import build_engine
from tools.peer_server_tests import pytest_plugin

ROOT = Path(__file__).resolve().parents[2]
TESTS = Path("tools/server/tests")
MAX_POSITIONS = 8192


def run_tests(
    checkout: Path, checkpoint: Path, selection: Sequence[str] = ()
) -> Mapping[str, Mapping[str, str]]:
    """Return outcome, message, failed line and refused request by test.

    Args:
        checkout: folder of llama.cpp's repository.
        checkpoint: of the model that is served.
        selection: files or tests below ``unit``; all of them without.

    Raises:
        FileNotFoundError: one of the folders is not what it should be.
    """
    tests = (checkout / TESTS).resolve()
    if not (tests / "utils.py").is_file():
        raise FileNotFoundError(f"{checkout} has no {TESTS}/utils.py; name a checkout of llama.cpp")
    if not (checkpoint / "config.json").is_file():
        raise FileNotFoundError(f"{checkpoint} has no config.json; name a checkpoint")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(tests)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            pytest_plugin.ENGINE_KEY: str(_build(checkpoint, folder)),
            pytest_plugin.OUTPUT_KEY: str(folder / "outcomes.json"),
        }
        files = [f"unit/{each}" for each in selection] or ["unit"]
        # tests fail: that is what is counted
        subprocess.run([*_command(), *files], cwd=tests, env=environment, check=False)
        outcomes: dict[str, dict[str, str]] = json.loads(
            (folder / "outcomes.json").read_text("utf-8")
        )
    return outcomes


def _command() -> list[str]:
    options = "-q -rN --tb=short --show-capture=no --no-header -W ignore --noconftest"
    options += " --continue-on-collection-errors -p no:cacheprovider --rootdir . -c"
    plugin = ["-p", pytest_plugin.__name__]
    marks = ["-m", "not slow"]
    return [sys.executable, "-m", "pytest", *options.split(), os.devnull, *plugin, *marks]


def _build(checkpoint: Path, folder: Path) -> Path:
    """The engine; with as many positions as llama.cpp allows, which does not ask the model."""
    copy, engine = folder / "checkpoint", folder / "stories.engine"
    shutil.copytree(checkpoint, copy)
    path = copy / "config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, "max_position_embeddings": MAX_POSITIONS}), "utf-8")
    build_engine(copy, engine, BuildConfig(dtype="float32", target="cpu"), check=False)
    return engine
