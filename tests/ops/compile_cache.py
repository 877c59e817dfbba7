"""Outputs of compilers, cached for later runs by the contents of all that the compilers read.

``make clean`` removes them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

GXX = shutil.which("g++")
GXX_VERSION = "0" if GXX is None else subprocess.check_output([GXX, "-dumpfullversion"], text=True)
FOLDER = Path(__file__).resolve().parents[2] / ".pytest_cache" / "compiled"


def compile_once(out: Path, read: Iterable[str | Path], compile: Callable[[], object]) -> None:
    """Write ``out``.

    Args:
        out: The output.
        read: Version and options of the compiler, and the files that it reads. The version of g++
            is read in any case: nvcc calls it.
        compile: Writes ``out``; not called if an earlier run read the same.
    """
    digest = hashlib.sha256()
    for each in (GXX_VERSION, *read):
        content = each.encode() if isinstance(each, str) else each.read_bytes()
        digest.update(b"%d " % len(content) + content)
    cached = FOLDER / f"{digest.hexdigest()}{out.suffix}"
    if cached.exists():
        shutil.copyfile(cached, out)
        return
    compile()
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = cached.with_name(f"{cached.name}.{os.getpid()}")  # another process may write the same
    shutil.copyfile(out, part)
    part.replace(cached)
