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

WORKER = Path(__file__).with_name("template_worker.py")
START_SECONDS = 60.0
# A busy machine may give the worker little of its time; the CPU limit is the rule, this only ends a
# hang.
WALL_FACTOR, WALL_GRACE = 15.0, 10.0


class _WorkerDied(Exception):
    """The worker ended; code as Popen.returncode has it."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class RefusedMessages(TemplateError, RequestError):
    """The template itself refused the messages (its raise_exception): the request is at fault."""


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use."""

    seconds: float = 2.0  # CPU time
    memory: int = 512 << 20  # bytes of address space, the interpreter's own ~60 MiB included
    output: int = 8 << 20  # characters


class TemplateProcess:
    """One worker, started at the first rendering and reused; restarted after it had to be killed.

    Renderings take turns: calls from several threads are safe.
    """

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self.limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._closing: weakref.finalize[..., TemplateProcess] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text; raises TemplateError (one line) when the template fails or exceeds a limit.

        RefusedMessages, a RequestError too, when the template calls raise_exception.
        """
        request = {
            "template": template,
            "variables": dict(variables),
            "seconds": self.limits.seconds,
            "max_chars": self.limits.output,
        }
        line = json.dumps(request).encode("ascii") + b"\n"
        with self._lock:
            reply = self._request(line)
            if reply.get("failed") == "memory":
                self._stop()  # a heap that hit its limit is not worth keeping
        if "text" in reply:
            return str(reply["text"])
        raise self._template_error(reply)

    def close(self) -> None:
        """Ends the worker, if one runs."""
        with self._lock:
            self._stop()

    def _request(self, line: bytes) -> dict[str, Any]:
        """The worker's reply; a worker that died without the clock's doing gets one successor."""
        for _ in range(2):
            try:
                worker = self._ensure_worker()
                self._send(worker, line)
                return self._receive(worker, self.limits.seconds * WALL_FACTOR + WALL_GRACE)
            except _WorkerDied as death:
                self._stop()
                if death.code == -signal.SIGPROF:
                    raise TemplateError(
                        "the chat template was stopped: it used more than "
                        f"{self.limits.seconds:g} s of CPU time; "
                        "use another template"
                    ) from None
                code = death.code
            except BaseException:
                self._stop()
                raise
        raise TemplateError(
            f"the chat template's process ended with status {code}: too much memory, or jinja2 is "
            "not installed"
        )

    def _ensure_worker(self) -> subprocess.Popen[bytes]:
        if self._worker is not None and self._worker.poll() is None:
            return self._worker
        self._stop()
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
                str(WORKER),
                str(self.limits.memory),
                str(packages),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )
        self._closing = weakref.finalize(self, _kill_worker, self._worker)
        self._receive(self._worker, START_SECONDS)
        return self._worker

    def _send(self, worker: subprocess.Popen[bytes], line: bytes) -> None:
        assert worker.stdin is not None
        try:
            worker.stdin.write(line)
            worker.stdin.flush()
        except OSError:
            raise _WorkerDied(worker.wait()) from None

    def _receive(self, worker: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        """Read the worker's next line.

        Raises:
            TemplateError: if it hangs or writes without end.
            _Died: if it has ended.
        """
        assert worker.stdout is not None
        descriptor = worker.stdout.fileno()
        # JSON writes a character in at most twelve bytes; the rest is for the error text
        most = 12 * self.limits.output + 8192
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
            if size > most:
                raise self._template_error({"failed": "output"})
            chunks.append(chunk)
        reply = json.loads(b"".join(chunks))
        assert isinstance(reply, dict)
        return reply

    def _template_error(self, reply: Mapping[str, Any]) -> TemplateError:
        failed, detail = reply.get("failed"), str(reply.get("detail", ""))
        if failed == "refused":
            return RefusedMessages(f"the chat template refused these messages: {detail}")
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

    def _stop(self) -> None:
        if self._closing is not None:
            self._closing()
        self._worker = self._closing = None


def _wait_readable(descriptor: int, seconds: float) -> bool:
    # poll, not select: a server may hold more than 1024 descriptors
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(max(seconds, 0.0) * 1000))


def _kill_worker(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unsent bytes to a process that is gone
                pipe.close()
    worker.wait()
