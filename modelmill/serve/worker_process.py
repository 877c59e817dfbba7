"""Starts and kills worker processes."""

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
    """Interface of a running worker process."""

    @property
    def pid(self) -> int:
        """Process id of the worker."""

    def kill(self) -> None:
        """Kill it now; does nothing once it has ended."""

    async def wait(self) -> int:
        """Return the exit code once it has ended; negative: the signal that killed it."""


class WorkerLauncher(Protocol):
    """Starts a worker process."""

    async def __call__(self) -> tuple[socket.socket, WorkerProcess]:
        """Return the API's end of the socket and the process, which has the other end."""
        ...


class WorkerSubprocess:
    """A worker in its own process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._psutil_process: psutil.Process | None = None
        with contextlib.suppress(psutil.Error, OSError):
            self._psutil_process = psutil.Process(process.pid)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def kill(self) -> None:
        """Kill it and its child processes (ranks, compilers).

        A stopped child would not notice that its parent is gone. asyncio's ``kill`` is not used: it
        polls the process and takes its exit code away from ``wait``.
        """
        if self._process.returncode is not None:
            return
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error, OSError):  # there may be no file descriptor left
            if self._psutil_process is not None:
                if not self._psutil_process.is_running():
                    return  # another process may have its id by now
                children = self._psutil_process.children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        for process in children:
            with contextlib.suppress(psutil.Error):
                process.kill()

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit code."""
        return await self._process.wait()


async def launch_worker() -> tuple[socket.socket, WorkerProcess]:
    """Start a worker process that waits for its ``OpenEngine``.

    It inherits no file descriptor but its end of the socket.

    Raises:
        OSError: the system has no process, memory or file descriptor left.
    """
    api_sock, worker_sock = socket.socketpair()
    with worker_sock:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "modelmill.serve.worker",
                str(worker_sock.fileno()),
                pass_fds=(worker_sock.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=env.worker_env(),
            )
        except BaseException:
            api_sock.close()
            raise
    return api_sock, WorkerSubprocess(process)
