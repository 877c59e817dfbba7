"""Runs ``modelmill serve`` as a child process, and measures and ends it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serve_command import read_address, serve_command
from modelmill.serve.segmentation_messages import SEGMENTATION_ENGINE_TYPE

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
NUM_LOG_LINES = 20
"""Last lines of the log that a failure shows."""


class SoakFailure(RuntimeError):
    """A check has failed; the message says which."""


class SoakServer:
    """A server process, whose log is read all the time; leaving the block ends it.

    ``leftover_processes`` returns those of its processes that still run.

    Attributes:
        model: name of the first engine that generates text.
        segment_model: name of the first engine that segments, or None.
        last_log_lines: the end of its log.
    """

    def __init__(
        self, engines: Path | Sequence[Path], flags: Sequence[str] = (), *, ready: bool = True
    ) -> None:
        paths = [engines] if isinstance(engines, Path) else engines
        self.process = subprocess.Popen(
            serve_command(paths, 0, *flags), stderr=subprocess.PIPE, text=True
        )
        try:
            address = urllib.parse.urlsplit(read_address(self.process))
        except RuntimeError as error:
            raise SoakFailure(str(error)) from None
        assert self.process.stderr is not None
        self.last_log_lines: deque[str] = deque(maxlen=NUM_LOG_LINES)
        self._log_reader = threading.Thread(
            target=_read_lines, args=(self.process.stderr, self.last_log_lines), daemon=True
        )
        self._log_reader.start()
        assert address.hostname is not None
        assert address.port is not None
        self.host, self.port = address.hostname, address.port
        self._processes: set[psutil.Process] = {psutil.Process(self.process.pid)}
        if ready:
            self.wait_for_health(200)
            models = self.request("/v1/models")[1]["data"]
            self.model = next(
                str(each["id"]) for each in models if each["kind"] != SEGMENTATION_ENGINE_TYPE
            )
            self.segment_model = next(
                (str(each["id"]) for each in models if each["kind"] == SEGMENTATION_ENGINE_TYPE),
                None,
            )

    def __enter__(self) -> SoakServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            self.wait_for_exit()

    def wait_for_exit(self, seconds: float = 60) -> int:
        """Wait until it ends and its log is read; return the exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SoakFailure(f"the server has not ended within {seconds} s") from None
        self._log_reader.join(seconds)  # its workers have the pipe, too, and end after it
        return code

    def leftover_processes(self, seconds: float = 30) -> list[int]:
        """Pids of its processes that still run after so many seconds."""
        _, alive = psutil.wait_procs(
            [each for each in self._processes if each.pid != self.process.pid], seconds
        )
        return [each.pid for each in alive]

    def workers(self) -> list[psutil.Process]:
        """Its worker processes."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self._processes.update(children)
        return [each for each in children if "modelmill.serve.worker" in _command_line(each)]

    def memory(self) -> dict[str, float]:
        """Resident MB of the API process and of the workers."""
        api_bytes = psutil.Process(self.process.pid).memory_info().rss
        return {
            "api": api_bytes / 1e6,
            "worker": sum(each.memory_info().rss for each in self.workers()) / 1e6,
        }

    def request(self, path: str, body: Any = None, seconds: float = 60) -> tuple[int, Any]:
        """Send a request; return (status, JSON or text).

        Raises:
            SoakFailure: no answer comes within ``seconds``.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://{self.host}:{self.port}{path}", data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                status, content, headers = response.status, response.read(), response.headers
        except urllib.error.HTTPError as error:
            with error:
                status, content, headers = error.code, error.read(), error.headers
        except TimeoutError:
            raise SoakFailure(
                "\n".join(
                    [f"{path}: no answer within {seconds} s; the log ends:", *self.last_log_lines]
                )
            ) from None
        return status, json.loads(content) if "json" in headers.get(
            "content-type", ""
        ) else content.decode()

    def wait_for_health(self, status: int, seconds: float = 300) -> Any:
        """Wait until /health returns the status; return its body."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            current, body = self.request("/health")
            if current == status:
                return body
            time.sleep(0.02)
        raise SoakFailure(f"/health has not become {status} within {seconds} s: {body}")

    def gauges(self) -> dict[str, float]:
        """Running and waiting requests, and the share of KV pages in use."""
        page = self.request("/metrics")[1]
        samples = {
            name: re.findall(rf"^modelmill:{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)
            for name in GAUGES
        }
        return {name: sum(map(float, values)) for name, values in samples.items()}

    def wait_until_idle(self, seconds: float = 60) -> dict[str, float]:
        """Wait until nothing runs or waits and every page is free; return the gauges.

        Raises:
            SoakFailure: that takes longer than ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while True:
            gauges = self.gauges()
            if not any(gauges.values()):
                return gauges
            if time.monotonic() > deadline:
                raise SoakFailure(f"{seconds} s after the last request: {gauges}")
            time.sleep(0.05)


def _read_lines(source: Iterable[str], last_lines: deque[str]) -> None:
    """Read to the end: a server may wait once nothing more fits into the pipe."""
    for line in source:
        last_lines.append(line.rstrip("\n"))


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return process.cmdline()
    return []
