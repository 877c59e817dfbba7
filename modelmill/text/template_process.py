"""Runs chat templates in a process of their own, which is killed when it exceeds its limits."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelmill.core.errors import MissingDependency, RequestError, TemplateError

WORKER_SCRIPT = Path(__file__).with_name("template_worker.py")
START_TIMEOUT_SECONDS = 60.0
# limits of wall time, which only end a hang: on a busy machine the worker may get little CPU time
WALL_TIME_FACTOR, WALL_TIME_GRACE_SECONDS = 15.0, 10.0


class _WorkerDied(Exception):
    """The worker process ended; code: its Popen.returncode."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class TemplateRefusedMessages(TemplateError, RequestError):
    """The template refused the messages with raise_exception: an invalid request."""


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of one rendering."""

    seconds: float = 2.0  # CPU time
    memory: int = 512 << 20  # bytes of address space, including ~60 MiB of the interpreter
    output: int = 8 << 20  # characters


class TemplateProcess:
    """One worker, started at the first rendering and reused; restarted after it was killed.

    Thread-safe: only one rendering runs at a time.
    """

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self.limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._closing: weakref.finalize[..., TemplateProcess] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Render a template.

        Raises:
            TemplateError: if the template fails or exceeds a limit; the message is one line.
            TemplateRefusedMessages: if the template calls raise_exception.
        """
        request = {
            "template": template,
            "variables": dict(variables),
            "seconds": self.limits.seconds,
            "max_chars": self.limits.output,
        }
        line = json.dumps(request).encode("ascii") + b"\n"
        with self._lock:
            reply = self._request_with_restart(line)
            if reply.get("failed") == "memory":
                self._stop_worker()  # restart with a fresh heap
        if "text" in reply:
            return str(reply["text"])
        raise self._make_template_error(reply)

    def close(self) -> None:
        """End the worker, if one runs."""
        with self._lock:
            self._stop_worker()

    def _request_with_restart(self, line: bytes) -> dict[str, Any]:
        """Return the worker's reply; restarts it once if it died, but not at the CPU limit."""
        for _ in range(2):
            try:
                worker = self._ensure_worker()
                self._send_line(worker, line)
                return self._receive_reply(
                    worker, self.limits.seconds * WALL_TIME_FACTOR + WALL_TIME_GRACE_SECONDS
                )
            except _WorkerDied as death:
                self._stop_worker()
                if death.code == -signal.SIGPROF:
                    raise TemplateError(
                        "the chat template was stopped: it used more than "
                        f"{self.limits.seconds:g} s of CPU time; "
                        "use another template"
                    ) from None
                code = death.code
            except BaseException:
                self._stop_worker()
                raise
        raise TemplateError(
            f"the chat template's process ended with status {code}: too much memory, or jinja2 is "
            "not installed"
        )

    def _ensure_worker(self) -> subprocess.Popen[bytes]:
        if self._worker is not None and self._worker.poll() is None:
            return self._worker
        self._stop_worker()
        spec = importlib.util.find_spec("jinja2")
        if spec is None or spec.origin is None:
            raise MissingDependency("chat templates need the package jinja2: pip install jinja2")
        packages = Path(spec.origin).parent.parent
        self._worker = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-X",
                "utf8",
                str(WORKER_SCRIPT),
                str(self.limits.memory),
                str(packages),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
        self._closing = weakref.finalize(self, _kill_worker, self._worker)
        self._receive_reply(self._worker, START_TIMEOUT_SECONDS)
        return self._worker

    def _send_line(self, worker: subprocess.Popen[bytes], line: bytes) -> None:
        assert worker.stdin is not None
        try:
            worker.stdin.write(line)
            worker.stdin.flush()
        except OSError:
            raise _WorkerDied(worker.wait()) from None

    def _receive_reply(self, worker: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        """Read the worker's next line.

        Raises:
            TemplateError: if it hangs or writes without end.
            _WorkerDied: if it has ended.
        """
        assert worker.stdout is not None
        descriptor = worker.stdout.fileno()
        # a character takes at most 12 bytes in JSON; 8192 bytes for the message of an error
        max_bytes = 12 * self.limits.output + 8192
        deadline = time.monotonic() + seconds
        chunks: list[bytes] = []
        size = 0
        while not (chunks and chunks[-1].endswith(b"\n")):
            if not _wait_readable(descriptor, deadline - time.monotonic()):
                raise TemplateError(
                    f"the chat template was stopped after {seconds:.0f} s; use a simpler template"
                )
            chunk = os.read(descriptor, 1 << 16)
            size += len(chunk)
            if not chunk:
                raise _WorkerDied(worker.wait())
            if size > max_bytes:
                raise self._make_template_error({"failed": "output"})
            chunks.append(chunk)
        reply = json.loads(b"".join(chunks))
        assert isinstance(reply, dict)
        return reply

    def _make_template_error(self, reply: Mapping[str, Any]) -> TemplateError:
        failed, detail = reply.get("failed"), str(reply.get("detail", ""))
        if failed == "refused":
            return TemplateRefusedMessages(f"the chat template refused these messages: {detail}")
        if failed == "output":
            return TemplateError(
                f"the chat template wrote more than {self.limits.output} characters; shorten the "
                "messages"
            )
        if failed == "memory":
            return TemplateError(
                f"the chat template used more than {self.limits.memory >> 20} MiB of memory"
            )
        return TemplateError(f"the chat template failed: {detail}")

    def _stop_worker(self) -> None:
        if self._closing is not None:
            self._closing()
        self._worker = self._closing = None


def _wait_readable(descriptor: int, seconds: float) -> bool:
    # poll, not select: a server may have more than 1024 descriptors
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(max(seconds, 0.0) * 1000))


def _kill_worker(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unsent bytes to a process that has ended
                pipe.close()
    worker.wait()
