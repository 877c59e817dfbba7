"""Compiling a CUDA source as modelmill does, to read what the compiler says about it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from modelmill.ops.cuda import build

NVCC = build.find_nvcc()
requires_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not here")


def compiles_without_spills(
    source: str, macros: Sequence[str], out: Path, max_spill_bytes: int = 0
) -> None:
    """Registers that spill, or products that the compiler runs one at a time, cost half the speed
    without a word.

    Of every kernel in the source. max_spill_bytes: bytes that one may put away, where the machine
    code was read: outside its loop.
    """
    assert NVCC is not None
    assert NVCC.path is not None
    target = [
        "-gencode=arch=compute_90a,code=sm_90a",
        *build.FLAGS,
        "-Xptxas",
        "-v",
        *(f"-D{m}" for m in macros),
    ]
    command = [NVCC.path, "-cubin", *target, "-o", str(out), str(build.FOLDER / source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spills
    assert all(int(number) <= max_spill_bytes for pair in spills for number in pair), done.stderr
    assert "serialized" not in done.stderr, "products that wait for one another"
