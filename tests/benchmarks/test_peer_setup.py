"""Engines of a benchmark are built as its options say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peer_setup import PeerSetup


@pytest.mark.parametrize("check", [True, False])
def test_an_engine_is_checked_unless_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    builds: list[tuple[str, ...]] = []
    setup = PeerSetup(tmp_path, check=check)
    monkeypatch.setattr(
        PeerSetup, "_run_module", lambda _, module, *arguments: builds.append((module, *arguments))
    )
    setup.cpu_engine(tmp_path / "m.gguf", "keep")
    setup.engine("qwen2.5-0.5b")
    built = [build for build in builds if build[:2] == ("modelmill", "build")]
    assert len(built) == 2
    assert all(("--no-check" in build) != check for build in built)
