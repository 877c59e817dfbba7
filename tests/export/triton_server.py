"""A real Triton Inference Server, from the wheel nvidia-pytriton, which carries the server and its
Python stubs.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from modelmill.core import env
from tests.wait import TIMEOUT_SECONDS

PACKAGES = ("pytriton", "tritonclient", "grpc")


def find_triton_package() -> Path:
    """The wheel's folder; skips with the reason where it cannot be used."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}: run it with make test-triton")
    spec = importlib.util.find_spec("pytriton")
    assert spec is not None
    assert spec.origin is not None
    import numpy

    if int(numpy.__version__.split(".")[0]) > 1:
        pytest.skip("the wheel's Python stub reads numpy 1 only: run it with make test-triton")
    return Path(spec.origin).parent


def copy_backends(package: Path, folder: Path) -> Path:
    """The Python backend with the stub of this Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = package / "tritonserver/python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        pytest.skip(f"the wheel has no stub for Python {version}")
    where = folder / "python"
    where.mkdir(parents=True)
    for file in (*(package / "tritonserver/backends/python").glob("*.*"), stub):
        shutil.copy(file, where)
    return folder


def server_environment(package: Path) -> dict[str, str]:
    """The stub loads the libpython of this interpreter, and finds its packages through the python3
    on PATH.
    """
    libraries = (sysconfig.get_config_var("LIBDIR"), str(package.parent / "nvidia_pytriton.libs"))
    environment = env.child_process_env()
    path = f"{Path(sys.prefix) / 'bin'}:{environment['PATH']}"
    return {
        **environment,
        "PATH": path,
        "LD_LIBRARY_PATH": ":".join(libraries),
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """tritonserver over a model repository; leaving the block ends it and checks that nothing is
    left of it.
    """

    def __init__(self, repository: Path, folder: Path, ready: bool = True) -> None:
        package = find_triton_package()
        self.http, self.grpc, self.metrics = free_port(), free_port(), free_port()
        self._log = folder / "triton.log"
        line = [
            str(package / "tritonserver/bin/tritonserver"),
            *(
                "--model-repository",
                str(repository),
                "--backend-directory",
                str(copy_backends(package, folder / "backends")),
            ),
            *(
                "--http-address",
                "127.0.0.1",
                "--grpc-address",
                "127.0.0.1",
                "--metrics-address",
                "127.0.0.1",
            ),
            *(
                "--http-port",
                str(self.http),
                "--grpc-port",
                str(self.grpc),
                "--metrics-port",
                str(self.metrics),
            ),
            *("--metrics-interval-ms", "100", "--exit-timeout-secs", "20"),
        ]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                line, stdout=log, stderr=log, env=server_environment(package)
            )
        if ready:
            self.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        children = (
            psutil.Process(self.process.pid).children(recursive=True)
            if self.process.poll() is None
            else []
        )
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        psutil.wait_procs(children, timeout=TIMEOUT_SECONDS)
        assert not [child for child in children if child.is_running()], self.log()

    def log(self) -> str:
        return self._log.read_text()

    def get(self, port: int, path: str, body: bytes | None = None) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{port}{path}", body, timeout=TIMEOUT_SECONDS
            ) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def wait(self, seconds: float = 300) -> None:
        """Until it is ready."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log()
            try:
                if self.get(self.http, "/v2/health/ready")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError(self.log())

    def gauge(self, name: str) -> float:
        """One of the engine's numbers on Triton's metrics page."""
        page = self.get(self.metrics, "/metrics")[1]
        value = re.search(rf"^modelmill:{name}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE)
        assert value, page
        return float(value[1])

    def wait_idle(self, seconds: float = TIMEOUT_SECONDS) -> None:
        """Until nothing runs, nothing waits and every page is free."""
        deadline = time.monotonic() + seconds
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        while any(self.gauge(name) for name in names):
            assert time.monotonic() < deadline, {name: self.gauge(name) for name in names}
            time.sleep(0.05)
