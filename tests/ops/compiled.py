"""What tests of CUDA sources share: nvcc compiles them, and registers suffice."""

from __future__ import annotations

import subprocess
from pathlib import Path

from modelmill.ops.cuda import build


def compiles_without_spills(source: str, macros: tuple[str, ...], out: Path) -> None:
    """Asserts it of one source and its macros; the cubin goes to ``out``."""
    found = build.nvcc()
    assert found is not None
    assert found.path is not None
    target = ["-gencode=arch=compute_90a,code=sm_90a", *build.FLAGS, "-Xptxas", "-v", *(f"-D{m}" for m in macros)]
    command = [found.path, "-cubin", *target, "-o", str(out), str(build.FOLDER / source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
    assert " bytes spill stores" not in done.stderr.replace("0 bytes spill stores", "")
    assert "serialized" not in done.stderr, "products that wait for one another"
