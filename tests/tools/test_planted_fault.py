"""The fault of the README's picture is planted, refused, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.cli.main import run_command_line
from tools import planted_fault


def test_the_fault_is_refused_and_named(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, engine = shared / "data/models/stories260K", tmp_path / "faulty.engine"
    assert planted_fault.main([str(checkpoint), "-o", str(engine), "--quiet"]) == 1
    assert "bug at layer 1, module attn.o_proj" in capsys.readouterr().err
    assert not engine.exists()


def test_compare_names_it_in_an_engine_that_was_not_checked(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, engine = str(shared / "data/models/stories260K"), str(tmp_path / "faulty.engine")
    assert planted_fault.main([checkpoint, "-o", engine, "--quiet", "--no-check"]) == 0
    assert run_command_line(["compare", engine, checkpoint]) == 1
    assert "bug at layer 1, module attn.o_proj" in capsys.readouterr().out
