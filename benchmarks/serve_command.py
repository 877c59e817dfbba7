"""The command that starts a server, and the address that the server prints."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def serve_command(engines: Sequence[Path], port: int, *flags: str) -> list[str]:
    """``modelmill serve`` in a process of this Python; port 0: any free one."""
    names = map(str, engines)
    return [sys.executable, "-m", "modelmill", "serve", *names, "--port", str(port), *flags]


def read_address(server: subprocess.Popen[str]) -> str:
    """Read a started server's address, like ``http://127.0.0.1:8123``, from its stderr (a pipe).

    Raises:
        RuntimeError: It ended without one; the message is all that it wrote.
    """
    assert server.stderr is not None
    line = server.stderr.readline()
    match = re.search(r"listening on (http://[^;]+);", line)
    if match is None:
        raise RuntimeError(line + server.stderr.read())
    return match[1]
