"""Code in a Python of its own, for what depends on what was imported before."""

from __future__ import annotations

import subprocess
import sys


def run_code(code: str) -> None:
    """Run it; what it wrote on stderr is the message of a failure."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
