"""Devices by name, and the kernels that one needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.core.errors import UsageError
from modelmill.loader.device import COMPILING_STAGE, ensure_cpu_kernels_compiled
from modelmill.ops.cpu.common import build as kernels


def test_waiting_for_a_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, made = [], []
    monkeypatch.setattr(kernels, "load_or_compile_library", lambda: made.append(1))
    for missing in (True, False):
        monkeypatch.setattr(kernels, "needs_compile", lambda: missing)  # noqa: B023
        ensure_cpu_kernels_compiled("cpu", lambda *stage: stages.append(stage))
    assert (stages, made) == ([(COMPILING_STAGE, 0, 1)], [1])
    with pytest.raises(UsageError, match="--device"):
        ensure_cpu_kernels_compiled("tpu", lambda *_: None)


def test_kernels_are_missing_in_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.env, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(kernels, "_find_compiler", lambda: ("c++", "a version"))
    assert kernels.needs_compile()
    target = kernels._library_path(kernels.native_compiler_flags(), "c++", "a version")
    target.parent.mkdir()
    target.touch()
    assert not kernels.needs_compile()
