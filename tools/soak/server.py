"""``modelmill serve`` as a child: started, asked, measured, ended, and nothing of it left."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from modelmill.serve.segment_messages import SEGMENTATION

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class SoakFailure(RuntimeError):
    """What was to be shown did not hold; the text says what."""


class SoakServer:
    """A server process. Leaving the block ends it; ``leftover_processes`` tells which of its
    processes live on.

    model: the name of the first engine that writes; segment_model: of the first that segments, or
    None.
    """

    def __init__(
        self, engines: Path | Sequence[Path], flags: Sequence[str] = (), *, ready: bool = True
    ) -> None:
        given = [engines] if isinstance(engines, Path) else engines
        words = [
            sys.executable,
            "-m",
            "modelmill",
            "serve",
            *map(str, given),
            "--port",
            "0",
            *flags,
        ]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = self.process.stderr.readline()
        found = re.search(r"listening on http://([^:]+):(\d+);", said)
        if found is None:
            raise SoakFailure(said + self.process.stderr.read())
        self.host, self.port = found[1], int(found[2])
        self._seen: set[psutil.Process] = {psutil.Process(self.process.pid)}
        if ready:
            self.wait_for_health(200)
            told = self.request("/v1/models")[1]["data"]
            self.model = next(str(each["id"]) for each in told if each["kind"] != SEGMENTATION)
            self.segment_model = next(
                (str(each["id"]) for each in told if each["kind"] == SEGMENTATION), None
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
        """Wait for its end; the exit code."""
        try:
            self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SoakFailure(f"the server has not ended within {seconds} s") from None
        return self.process.returncode

    def leftover_processes(self, seconds: float = 30) -> list[int]:
        """Processes of it that still run, so long after they should not."""
        _, alive = psutil.wait_procs(
            [each for each in self._seen if each.pid != self.process.pid], seconds
        )
        return [each.pid for each in alive]

    def workers(self) -> list[psutil.Process]:
        """Its workers."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self._seen.update(children)
        return [each for each in children if "modelmill.serve.worker" in _words(each)]

    def memory(self) -> dict[str, float]:
        """Resident MB of the API and of the workers."""
        own = psutil.Process(self.process.pid).memory_info().rss
        return {
            "api": own / 1e6,
            "worker": sum(each.memory_info().rss for each in self.workers()) / 1e6,
        }

    def request(self, path: str, body: Any = None, seconds: float = 60) -> tuple[int, Any]:
        """(status, JSON or text)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://{self.host}:{self.port}{path}", data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                status, content, told = response.status, response.read(), response.headers
        except urllib.error.HTTPError as error:
            with error:
                status, content, told = error.code, error.read(), error.headers
        return status, json.loads(content) if "json" in told.get(
            "content-type", ""
        ) else content.decode()

    def wait_for_health(self, status: int, seconds: float = 300) -> Any:
        """Until /health answers so; what it tells."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found, body = self.request("/health")
            if found == status:
                return body
            time.sleep(0.02)
        raise SoakFailure(f"/health has not become {status} within {seconds} s: {body}")

    def gauges(self) -> dict[str, float]:
        """Running, waiting, share of KV pages held."""
        page = self.request("/metrics")[1]
        found = {
            name: re.findall(rf"^modelmill:{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)
            for name in GAUGES
        }
        return {name: sum(map(float, values)) for name, values in found.items()}

    def wait_until_idle(self, seconds: float = 60) -> dict[str, float]:
        """Wait until nothing runs, nothing waits and every page is free. Raises Failed."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.gauges()
            if not any(found.values()):
                return found
            if time.monotonic() > deadline:
                raise SoakFailure(f"{seconds} s after the last request: {found}")
            time.sleep(0.05)


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return process.cmdline()
    return []
