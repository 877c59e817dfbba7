"""A real, tiny engine, built once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.cli.main import run_command_line
from tests.optional_extras import skip_if_extra_missing


@pytest.fixture(scope="session")
def checkpoint(shared: Path) -> Path:
    """A trained LLaMA of 260 thousand parameters."""
    return shared / "data/models/stories260K"


@pytest.fixture(scope="session")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its engine in float32, accepted, built through the command line."""
    out = tmp_path_factory.mktemp("engines") / "stories.engine"
    assert run_command_line(["build", str(checkpoint), "-o", str(out), "--dtype", "float32"]) == 0
    return out


@pytest.fixture(autouse=True)
def _no_flags_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset MODELMILL_<FLAG> of the surrounding shell, so that tests see only their own flags."""
    for name in list(os.environ):
        if name.startswith("MODELMILL_") and name != "MODELMILL_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, Any, str]]:
    """Runs a command line in this process: (exit code, stdout, stderr); stdout parsed where --json
    is among the words.

    One thread, and no words of the environment.
    """
    monkeypatch.setenv("MODELMILL_THREADS", "1")
    monkeypatch.setenv("CI", "1")
    threads = torch.get_num_threads()

    def call(*words: object) -> tuple[int, Any, str]:
        capsys.readouterr()
        code = run_command_line([str(word) for word in words])
        torch.set_num_threads(threads)
        out = capsys.readouterr()
        skip_if_extra_missing(out.err)
        return code, json.loads(out.out) if "--json" in words and code != 2 else out.out, out.err

    return call
