"""A test server: SmolLM2 in float32 on the CPU behind ``modelmill serve``, in its own process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2"
FLAGS = ("--device", "cpu", "--max-model-len", "2048", "--kv-cache-bytes", str(1 << 30))


def engine(out: Path) -> Path:
    """SmolLM2-135M-Instruct in float32, pulled and built once under ``out``."""
    from modelmill.artifact.store import is_engine_folder
    from modelmill.checkpoint.pull import pull
    from modelmill.core.config import BuildConfig
    from modelmill.llm import build_engine

    path = out / "smollm2-float32.engine"
    if not is_engine_folder(path):
        checkpoint = pull(MODEL, ROOT / "out" / "models")
        build_engine(
            checkpoint, path, BuildConfig(dtype="float32", quantization="none", target="cpu")
        )
    return path


@contextlib.contextmanager
def serve_engine(
    path: Path,
    log: Path,
    flags: tuple[str, ...] = FLAGS,
    seconds: float = 300.0,
    names: Sequence[str] = (MODEL,),
) -> Iterator[str]:
    """The base URL (…/v1) of a server of this engine, with these names; ended with SIGTERM.

    Raises RuntimeError where it does not come up within ``seconds``; its stderr is in ``log``.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "modelmill",
        "serve",
        str(path),
        *(word for name in names for word in ("--served-model-name", name)),
        "--port",
        "0",
        *flags,
    ]
    with (
        log.open("w") as err,
        subprocess.Popen(command, stdout=err, stderr=err, cwd=ROOT) as process,
    ):
        try:
            yield _address(process, log, time.monotonic() + seconds) + "/v1"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen[bytes], log: Path, deadline: float) -> str:
    """Where it listens, once every engine is ready."""
    url = ""
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {log}")
        if not url:
            _, separator, rest = log.read_text().partition("listening on ")
            url = rest.split(";")[0].strip() if separator and ";" in rest else ""
        elif _ready(url):
            return url
        time.sleep(0.2)
    raise RuntimeError(f"the server did not come up; see {log}")


def _ready(url: str) -> bool:
    with (
        contextlib.suppress(urllib.error.URLError, OSError),
        urllib.request.urlopen(url + "/health", timeout=5) as answer,
    ):
        return json.load(answer)["status"] == "ok"
    return False
