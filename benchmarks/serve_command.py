"""The command that starts a server."""

from __future__ import annotations

import sys
from pathlib import Path


def serve_command(engines: list[Path], port: int, *flags: str) -> list[str]:
    """``modelmill serve`` in a process of this Python; port 0: any free one."""
    names = map(str, engines)
    return [sys.executable, "-m", "modelmill", "serve", *names, "--port", str(port), *flags]
