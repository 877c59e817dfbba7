"""``python tools/clean_room.py``: build wheel and sdist, and use them where nothing else is.

Each Python gets a new environment outside the checkout, with torch and then the wheel alone; the
commands run in an empty folder, with an empty cache and home, and a PATH of that environment and of
the system's compiler. Checked are: what the archives carry; the line that an absent extra gives,
and the command in it; the first compilation of the CPU kernels from the installed sources; the
demo; the server, its page and an answer; the same without a compiler. Prints a table; exit code 1
if a step fails. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.setup_venv import CPU_TORCH  # noqa: E402
from tools.version_matrix import find_python  # noqa: E402

PYTHONS = ("3.11", "3.13")
COMPILERS = ("g++", "c++", "clang++")
PROMPT = "What is the capital of France?"
TIMEOUT_SECONDS = 1800.0
START_SECONDS = 300.0
# written when something runs or is built, or of the repository alone
NOT_CARRIED = re.compile(r"(^|/)__pycache__/|\.py[cod]$|^modelmill/.*\.so$")


class StepFailed(Exception):
    """Why a step failed, in one line."""


@dataclass
class Step:
    """One row of the table."""

    room: str
    name: str
    outcome: str
    seconds: float


@dataclass
class Report:
    """The steps so far; a failed one does not stop the others of its room."""

    steps: list[Step] = field(default_factory=list)

    def run(self, room: str, name: str, action: Callable[[], str | None]) -> bool:
        """Run a step; its text, if any, is shown. Returns whether it passed."""
        print(f"{room}: {name} …", flush=True)
        began = time.monotonic()
        try:
            outcome, passed = " ".join((action() or "passed").split()), True
        except (StepFailed, OSError, subprocess.TimeoutExpired) as problem:
            outcome, passed = f"FAILED: {' '.join(str(problem).split())[:400]}", False
        self.steps.append(Step(room, name, outcome, time.monotonic() - began))
        print(f"    {outcome}", flush=True)
        return passed

    def table(self) -> str:
        """All steps in Markdown."""
        rows = [f"| {s.room} | {s.name} | {s.outcome} | {s.seconds:.0f} |" for s in self.steps]
        return "\n".join(["| where | step | outcome | s |", "| --- | --- | --- | --- |", *rows])

    @property
    def failed(self) -> bool:
        """Whether any step failed."""
        return any(step.outcome.startswith("FAILED") for step in self.steps)


@dataclass(frozen=True)
class Room:
    """A new environment and an empty folder to work in.

    Attributes:
        name: in the table.
        folder: holds both, a home and a cache.
    """

    name: str
    folder: Path

    @property
    def python(self) -> Path:
        """The interpreter of the environment."""
        return self.folder / "venv" / "bin" / "python"

    def environment(self, *, compiler: bool = True) -> dict[str, str]:
        """Variables of a bare shell; without a compiler the cache is another, empty one."""
        home = self.folder / ("home" if compiler else "home-without-compiler")
        paths = [self.python.parent, *(["/usr/bin", "/bin"] if compiler else [])]
        home.mkdir(exist_ok=True)
        pip = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        return pip | {
            "PATH": os.pathsep.join(map(str, paths)), "HOME": str(home), "LANG": "C.UTF-8",
            "XDG_CACHE_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1",
        }  # fmt: skip

    def run(
        self, *words: object, compiler: bool = True, code: int = 0, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the empty folder.

        Raises:
            StepFailed: if it ends with another exit code than ``code``, or prints no ``text``.
        """
        done = subprocess.run(
            [str(word) for word in words], cwd=self.folder / "work", capture_output=True, text=True,
            env=self.environment(compiler=compiler), timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
        output = done.stdout + done.stderr
        if done.returncode != code:
            raise StepFailed(f"exit code {done.returncode}: {output.strip()[-300:]}")
        if text not in output:
            raise StepFailed(f"{text!r} is not in: {output.strip()[-300:]}")
        return done

    @property
    def modelmill(self) -> Path:
        """The installed command."""
        return self.python.with_name("modelmill")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every step passed."""
    options = _parse(argv)
    report = Report()
    base = Path(tempfile.mkdtemp(prefix="modelmill-clean-room-", dir=options.folder))
    try:
        wheel = build_archives(base, report)
        if wheel is not None:
            for version in options.python:
                interpreter = find_python(version)
                if interpreter is None:
                    report.steps.append(Step(version, "find it", "not here: skipped", 0.0))
                    continue
                room = Room(f"Python {version}", base / version)
                examine(room, interpreter, wheel, options.checkpoint, report)
                shutil.rmtree(room.folder, ignore_errors=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    print("\n" + report.table())
    return 1 if report.failed else 0


def build_archives(base: Path, report: Report) -> Path | None:
    """Build the sdist from a copy of the checkout, and the wheel from the sdist; check both.

    The wheel has no compiled kernels, so that the rooms compile them from its sources.
    """
    tracked = _output("git", "-C", ROOT, "ls-files", "-z").split("\0")[:-1]
    files = [name for name in tracked if (ROOT / name).is_file()]
    dist = base / "dist"

    def build() -> None:
        source, builder = base / "source", base / "builder"
        for name in files:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
        _run(sys.executable, "-m", "venv", builder)
        _run(builder / "bin" / "python", "-m", "pip", "install", "-q", "build")
        os.environ["MODELMILL_WHEEL_KERNELS"] = "none"
        _run(builder / "bin" / "python", "-m", "build", "-o", dist, source)

    if not report.run("checkout", "build sdist and wheel", build):
        return None
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    report.run("checkout", "sdist carries every file", lambda: check_sdist(sdist, files))
    report.run("checkout", "wheel carries every file", lambda: check_wheel(wheel, files))
    return wheel


def check_sdist(path: Path, files: Sequence[str]) -> str:
    """Every tracked file is in the source archive."""
    with tarfile.open(path) as archive:
        carried = {name.partition("/")[2] for name in archive.getnames()}
    return _all_carried(files, carried)


def check_wheel(path: Path, files: Sequence[str]) -> str:
    """Every tracked file of the package is in the wheel, and nothing of other folders is."""
    with zipfile.ZipFile(path) as archive:
        carried = set(archive.namelist())
    others = {name.partition("/")[0] for name in carried} - {"modelmill"}
    if any(not name.endswith(".dist-info") for name in others):
        raise StepFailed(f"it also carries {sorted(others)}")
    return _all_carried([name for name in files if name.startswith("modelmill/")], carried)


def _all_carried(files: Sequence[str], carried: set[str]) -> str:
    missing = sorted(name for name in set(files) - carried if not NOT_CARRIED.search(name))
    if missing:
        raise StepFailed(f"{len(missing)} are missing: {', '.join(missing[:5])}")
    return f"passed: {len(files)} files"


def examine(
    room: Room, interpreter: str, wheel: Path, checkpoint: Path | None, report: Report
) -> None:
    """All steps of one Python."""
    (room.folder / "work").mkdir(parents=True)
    pip = (room.python, "-m", "pip", "install", "-q", "--disable-pip-version-check")

    def install() -> None:
        _run(interpreter, "-m", "venv", room.folder / "venv")
        room.run(*pip, CPU_TORCH)
        room.run(*pip, wheel)

    if not report.run(room.name, "install torch and the wheel", install):
        return
    steps: Mapping[str, Callable[[], str | None]] = {
        "serve without its extra": lambda: missing_extra(room),
        "doctor": lambda: doctor(room),
        "demo: fetch and build": lambda: build_demo(room, checkpoint),
        "demo: run": lambda: answer(room),
        "run without a compiler": lambda: without_compiler(room),
        "serve: page and chat": lambda: serve(room),
    }
    for name, action in steps.items():
        report.run(room.name, name, action)


def missing_extra(room: Room) -> str:
    """One line names the packages, and its command installs them."""
    done = room.run(
        room.modelmill, "serve", "x.engine", code=1, text="install it with: pip install"
    )
    if done.stderr.count("\n") != 1:
        raise StepFailed(f"not one line: {done.stderr}")
    command = done.stderr.partition("install it with: ")[2].strip()
    room.run("sh", "-c", command.replace("pip install", "pip install -q", 1))
    room.run(room.modelmill, "serve", "x.engine", code=2, text="x.engine")
    return f"passed: {command}"


def doctor(room: Room) -> str:
    """It compiles the CPU kernels from the installed sources; nothing required is missing."""
    facts = json.loads(room.run(room.modelmill, "doctor", "--json").stdout)
    kernels = facts["cpu_kernels"]
    if kernels["origin"] is None:
        raise StepFailed(kernels["reason"])
    if str(ROOT) in json.dumps(facts):
        raise StepFailed("it reads the checkout")
    outside = [f"{each['name']} {each['version']}" for each in facts["outside"]]
    return f"passed: kernels {kernels['origin']}; untested versions: {', '.join(outside) or 'none'}"


def build_demo(room: Room, checkpoint: Path | None) -> None:
    """SmolLM2, fetched unless a checkpoint is given, becomes an engine."""
    if checkpoint is None:
        room.run(room.modelmill, "pull", "smollm2", "-o", "models")
        checkpoint = room.folder / "work/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    words = ("build", checkpoint, "-o", "demo.engine", "--dtype", "bfloat16", "-q", "int8")
    room.run(room.modelmill, *words, "--quiet")


def answer(room: Room, *, compiler: bool = True) -> str:
    """The engine answers; the lines on stderr."""
    words = ("run", "demo.engine", "--prompt", PROMPT, "--temperature", "0", "--max-tokens", "8")
    return room.run(room.modelmill, *words, compiler=compiler, text="Paris").stderr


def without_compiler(room: Room) -> str:
    """One line says what is missing, and torch computes the same answer."""
    lines = [line for line in answer(room, compiler=False).splitlines() if "compiler" in line]
    if len(lines) != 1:
        raise StepFailed(f"{len(lines)} lines name the compiler: {lines}")
    return f"passed: {lines[0]}"


def serve(room: Room) -> str:
    """The server brings its page, answers a chat, and ends on SIGTERM with exit code 0."""
    with _server(room) as (process, url):
        page = _fetch(url + "/")
        if "<html" not in page:
            raise StepFailed(f"no page: {page[:200]}")
        links = re.findall(r'(?:src|href)="(/[^"#]+)"', page)
        for link in links:
            _fetch(url + link)
        messages = [{"role": "user", "content": PROMPT}]
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 8}
        reply = json.loads(_fetch(url + "/v1/chat/completions", body))
        text = reply["choices"][0]["message"]["content"]
        if "Paris" not in text:
            raise StepFailed(f"the answer is {text!r}")
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    if code != 0:
        raise StepFailed(f"exit code {code} after SIGTERM")
    return f"passed: page with {len(links)} files, {text!r}"


@contextmanager
def _server(room: Room) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its URL."""
    log = room.folder / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(room.modelmill), "serve", "demo.engine", "--port", "0"], text=True,
            cwd=room.folder / "work", stdout=output, stderr=subprocess.STDOUT,
            env=room.environment(),
        )  # fmt: skip
    try:
        yield process, _wait_for_url(process, log)
    finally:
        process.kill()
        process.wait()


def _wait_for_url(process: subprocess.Popen[str], log: Path) -> str:
    """The address that the server prints, once it is ready."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        address = re.search(r"http://[\d.]+:\d+", log.read_text())
        if address is not None and _is_ready(address[0]):
            return address[0]
        time.sleep(1)
    raise StepFailed(f"the server is not ready: {log.read_text()[-300:]}")


def _is_ready(url: str) -> bool:
    try:
        return bool(json.loads(_fetch(url + "/health"))["status"] == "ok")
    except (OSError, ValueError, KeyError):
        return False


def _fetch(url: str, body: Mapping[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        return str(response.read().decode(errors="replace"))


def _output(*command: object) -> str:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=True
    ).stdout


def _run(*command: object) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StepFailed(f"{' '.join(words[:4])}: {(done.stdout + done.stderr).strip()[-300:]}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="Pythons (3.11 and 3.13)")
    parser.add_argument("--folder", type=Path, help="of the rooms, several GB (default: /tmp)")
    parser.add_argument("--checkpoint", type=Path, help="instead of fetching SmolLM2")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
