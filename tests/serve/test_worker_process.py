"""A worker's process from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from modelmill.serve.worker_process import WorkerSubprocess


def test_ending_one_that_has_ended_leaves_its_exit_code_to_who_waits() -> None:
    """Polling a dead child takes its exit code away: asyncio would warn and return 255."""
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
    process: Any = SimpleNamespace(pid=child.pid, returncode=None, kill=child.kill)
    WorkerSubprocess(process).kill()
    _, status = os.waitpid(child.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    child.returncode = 7
    process.returncode = 7
    WorkerSubprocess(process).kill()  # the number may be another's now
