"""Compiling a CUDA source as modelmill does, to check the output of the compiler."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from modelmill.ops.cuda.common import build
from tests.ops.compile_cache import compile_once

NVCC = build.find_nvcc()
requires_nvcc = pytest.mark.skipif(
    NVCC is None, reason="needs nvcc: install the CUDA toolkit, 12 or newer"
)
WHY_NOT_CUDA = build.unavailable_reason("cuda")
requires_cuda_kernels = pytest.mark.skipif(WHY_NOT_CUDA is not None, reason=str(WHY_NOT_CUDA))


def compiles_without_spills(
    source: str, macros: Sequence[str], out: Path, max_spill_bytes: int = 0
) -> None:
    """Check that a source compiles without a warning, spilled registers or serialized products.

    Spills and serialized products halve the speed without an error. max_spill_bytes: bytes that a
    kernel may spill, where the machine code was inspected and the spills are outside its loop.
    """
    assert NVCC is not None
    assert NVCC.path is not None
    target = [
        "-gencode=arch=compute_90a,code=sm_90a",
        *build.NVRTC_FLAGS,
        build.include_flag(),
        "-Xcompiler=-Wall,-Wextra",
        "-Werror=all-warnings",
        "-Xptxas",
        "-v",
        *(f"-D{m}" for m in macros),
    ]
    path = build.source_path(Path(source).stem)
    command = [NVCC.path, "-cubin", *target, "-o", str(out), str(path)]
    log = out.with_suffix(".log")

    def compile() -> None:
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
        log.write_text(result.stderr)

    read = (str(NVCC), repr(target), source, *sorted(build.KERNEL_SOURCES_FOLDER.rglob("*.cu*")))
    compile_once(log, read, compile)
    text = log.read_text()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert spills
    assert all(int(number) <= max_spill_bytes for pair in spills for number in pair), text
    assert "serialized" not in text, "serialized wgmma products"
