"""``modelmill serve`` in a process of its own, and plain sockets to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import psutil

from tests.optional_extras import skip_if_extra_missing
from tests.wait import TIMEOUT_SECONDS

FLAGS = ("--device", "cpu", "--threads", "1", "--kv-cache-bytes", "8000000", "--port", "0")


class ServerProcess:
    """A server; leaving the block ends it and checks that nothing is left of it."""

    def __init__(
        self,
        *words: object,
        ready: bool = True,
        template: str = "chatml",
        flags: tuple[str, ...] = FLAGS,
    ) -> None:
        line = [sys.executable, "-m", "modelmill", "serve", *map(str, words), *flags]
        line += ["--chat-template", template] if template else []
        self.process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        first_line = self.read_line()
        skip_if_extra_missing(first_line)
        match = re.search(r"listening on http://([^:]+):(\d+);", first_line)
        assert match, first_line + self.process.stderr.read()
        self.address = match[1], int(match[2])
        self.url = f"http://{match[1]}:{match[2]}"
        try:
            if ready:
                self.wait(200)
        except BaseException:
            self.process.kill()
            raise

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
        self.finish()

    def read_line(self) -> str:
        """The next line of stderr, byte by byte: ``finish`` misses what readline reads ahead."""
        assert self.process.stderr is not None
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(self.process.stderr.fileno(), 1)):
            line += byte
        return line.decode()

    def finish(self, seconds: float = TIMEOUT_SECONDS) -> tuple[int, str]:
        """Wait for its end: (exit code, what it said on stderr); no process of it may be left."""
        try:
            _, stderr = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, stderr

    @property
    def workers(self) -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process(self.process.pid).children()
            if "modelmill.serve.worker" in child.cmdline()
        ]

    def request(
        self, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, JSON or text, headers)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json", **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                status, content, response_headers = (
                    response.status,
                    response.read(),
                    response.headers,
                )
        except urllib.error.HTTPError as error:
            with error:
                status, content, response_headers = error.code, error.read(), error.headers
        lower_headers = {name.lower(): value for name, value in response_headers.items()}
        return (
            status,
            json.loads(content)
            if "json" in lower_headers.get("content-type", "")
            else content.decode(),
            lower_headers,
        )

    def wait(self, status: int, seconds: float = 600) -> Any:
        """Until /health answers so."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            current, body, _ = self.request("/health")
            if current == status:
                return body
            time.sleep(0.05)
        raise AssertionError(f"/health does not become {status}: {body}")

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=TIMEOUT_SECONDS)

    def start_post(self, path: str, body: Any) -> socket.socket:
        """A POST whose answer is left to be read."""
        data = json.dumps(body).encode()
        sock = self.connect()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        return sock

    def wait_for_queue(self, count: int, seconds: float = TIMEOUT_SECONDS) -> None:
        """Until so many prompts wait for their turn."""
        deadline, waiting = (
            time.monotonic() + seconds,
            re.compile(r"num_requests_waiting{[^}]*} ([0-9.]+)"),
        )
        while (
            not (values := waiting.findall(self.request("/metrics")[1])) or float(values[0]) < count
        ):
            assert time.monotonic() < deadline, f"no {count} prompts ever wait"
            time.sleep(0.01)

    def wait_idle(self, seconds: float = TIMEOUT_SECONDS) -> None:
        """Until nothing runs, nothing waits and every page is free."""
        deadline = time.monotonic() + seconds
        zero_gauges = [
            rf"{name}{{[^}}]*}} 0\.0\n"
            for name in ("num_requests_running", "waiting", "kv_cache_usage_perc")
        ]
        while time.monotonic() < deadline:
            page = self.request("/metrics")[1]
            if all(re.search(pattern, page) for pattern in zero_gauges):
                return
            time.sleep(0.05)
        raise AssertionError(re.findall(r"^modelmill:(?:num|kv).*$", page, re.MULTILINE))


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    parts = []
    while part := sock.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)
