"""Starting worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import Protocol

import psutil

from modelmill.core import env


class WorkerProcess(Protocol):
    """A running worker."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def kill(self) -> None:
        """End it now; nothing happens where it has ended."""

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative: the signal that ended it."""


class WorkerLauncher(Protocol):
    """Starts a worker: its end of the socket belongs to it, ours is returned."""

    async def __call__(self) -> tuple[socket.socket, WorkerProcess]: ...


class WorkerSubprocess:
    """A worker in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._psutil_process: psutil.Process | None = None
        with contextlib.suppress(psutil.Error, OSError):
            self._psutil_process = psutil.Process(process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it and what it has started (ranks, compilers) now: of these, one that is stopped
        would not see it go.

        asyncio's own ``kill`` would look whether it has ended, and take its exit code from
        ``wait``.
        """
        if self._process.returncode is not None:
            return
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error, OSError):  # no descriptor may be left to look with
            if self._psutil_process is not None:
                if not self._psutil_process.is_running():
                    return  # its id may be another's by now
                started = self._psutil_process.children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        for process in started:
            with contextlib.suppress(psutil.Error):
                process.kill()

    async def wait(self) -> int:
        """Its exit code."""
        return await self._process.wait()


async def launch_worker() -> tuple[socket.socket, WorkerProcess]:
    """A worker process that waits for its ``OpenEngine``. It holds no descriptor of ours but its
    end of the socket.

    Raises OSError where the system has none left: of processes, memory or descriptors.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "modelmill.serve.worker",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=env.worker_env(),
            )
        except BaseException:
            ours.close()
            raise
    return ours, WorkerSubprocess(process)
