"""``make test-versions``: the ranges of pyproject.toml, tested at both ends, each cell in a fresh environment.

A cell is a Python and a set of versions: ``oldest`` (every lower end, all at once), ``newest`` (what a plain install
takes within the ranges), ``core`` (newest, no extra: the tests of what is absent must be skipped) and ``next`` (newest
without upper ends: what a wider range would let in; it may fail and tells then why the range ends). Only ``oldest`` and
``newest`` bind.

Resumable: a cell that passed with the same sources is not run again (--again runs it). The environment of a cell that
passed is removed; that of one that failed is left, to look into. Standard library and ``packaging`` only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "versions"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLD_PYTHON = PYTHONS[0]  # old versions have no wheels for a Python that came after them
SETS = ("oldest", "newest", "core", "next")
EXTRAS = ("gpu", "eval", "report", "serve", "otel", "test")
TOOLS = ("ruff", "mypy", "types-PyYAML", "types-psutil")  # they check the sources: their versions are no user's matter
SECONDS = 3600.0

TESTS = {
    "torch": ("tests/nn/test_last.py", "tests/runtime/test_sampler.py", "tests/test_llm.py"),
    "numpy": ("tests/weights/test_int4.py", "tests/artifact/test_shard.py"),
    "safetensors": ("tests/checkpoint/test_safetensors.py",),
    "tokenizers": ("tests/text/test_tokenizer.py",),
    "tiktoken": ("tests/text/test_tiktoken_qwen.py",),
    "sentencepiece": ("tests/text/test_spm.py",),
    "jinja2": ("tests/text/test_chat.py",),
    "huggingface_hub": ("tests/checkpoint/test_pull.py",),
    "psutil": ("tests/core/test_ram.py",),
    "packaging": ("tests/core/test_packages.py",),
    "pillow": ("tests/vision/test_image.py",),
    "pyyaml": ("tests/core/test_config.py",),
    "typer and rich": ("tests/cli/test_main.py", "tests/cli/test_options.py", "tests/cli/test_verbs.py"),
    "triton": ("tests/ops/test_sample.py", "tests/ops/test_quick.py"),
    "rouge-score": ("tests/eval/test_rouge.py",),
    "transformers": ("tests/models/test_raw.py", "tests/benchmarks/test_proxy.py"),
    "matplotlib": ("tests/eval/test_report.py", "tests/eval/test_align.py"),
    "fastapi, uvicorn and pydantic": ("tests/serve/test_shape.py", "tests/serve/test_complaint.py"),
    "openai": ("tests/serve/test_server.py",),
    "prometheus-client": ("tests/serve/test_engine.py",),
    "llguidance": ("tests/text/test_grammar.py",),
    "opentelemetry": ("tests/serve/test_traces.py",),
    "gguf": ("tests/checkpoint/test_gguf.py",),
}
"""For each library the tests in which it does its work: not all of the suite, which tests our own code for hours."""


@dataclass(frozen=True)
class Cell:
    """One environment."""

    python: str
    set: str

    @property
    def name(self) -> str:
        return f"{self.python}-{self.set}"

    @property
    def binds(self) -> bool:
        """Whether its failure fails the matrix."""
        return self.set != "next"


@dataclass(frozen=True)
class Result:
    """What became of a cell. outcome: passed, failed, or why it could not run. versions: name → installed."""

    outcome: str
    sources: str
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 where every cell that binds and could run passed, 1 where one failed or none could run."""
    options = _parse(argv)
    OUT.mkdir(parents=True, exist_ok=True)
    sources, found = digest(), {}
    cells = [cell for cell in cells_of(options.python) if not options.set or cell.set in options.set]
    for place, cell in enumerate(cells, 1):
        print(f"[{place}/{len(cells)}] {cell.name}", flush=True)
        kept = None if options.again else stored(cell, sources)
        found[cell] = kept or run(cell, sources, options.pin)
        if kept is None:
            (OUT / f"{cell.name}.json").write_text(json.dumps(asdict(found[cell]), indent=1))
        print(f"    {summary(found[cell])}{' (kept)' if kept else ''}", flush=True)
    print("\n" + table(found))
    bad = any(result.outcome == "failed" and cell.binds for cell, result in found.items())
    return 1 if bad or not any(result.outcome in ("passed", "failed") for result in found.values()) else 0


def cells_of(pythons: Iterable[str]) -> list[Cell]:
    """Both ends on the oldest Python, the newest versions on every one, the core alone and the next on one each."""
    chosen = list(pythons)
    cells = [Cell(OLD_PYTHON, "oldest")] if OLD_PYTHON in chosen else []
    cells += [Cell(python, "newest") for python in chosen]
    return [*cells, Cell(chosen[0], "core"), Cell(chosen[-1], "next")]


def requirements(which: str) -> list[str]:
    """What pip is to install for a set, as lines; torch is the first."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    lines = list(project["dependencies"])
    lines += [line for line in extras["test"] if line.startswith("pytest")] if which == "core" else [
        line for extra in EXTRAS for line in extras[extra]
    ]  # fmt: skip
    found = {}
    for line in lines:
        requirement = Requirement(line)
        if requirement.name not in TOOLS:
            found[requirement.name] = {"oldest": oldest, "next": unbounded}.get(which, str)(requirement)
    return list(found.values())


def oldest(requirement: Requirement) -> str:
    """``name==lower end``. Raises ValueError for a range without one."""
    for part in requirement.specifier:
        if part.operator in (">=", "=="):
            return f"{_named(requirement)}=={part.version}"
    raise ValueError(f"{requirement} has no lower end")


def unbounded(requirement: Requirement) -> str:
    """The range without its upper end."""
    kept = [str(part) for part in requirement.specifier if not part.operator.startswith("<")]
    return f"{_named(requirement)}{','.join(kept)}"


def _named(requirement: Requirement) -> str:
    return requirement.name + (f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else "")


def run(cell: Cell, sources: str, pins: Sequence[str]) -> Result:
    """A fresh environment, the tests in it, and what came of both."""
    began = time.monotonic()
    interpreter = find_python(cell.python)
    if interpreter is None:
        return Result(f"no Python {cell.python} here", sources)
    folder = OUT / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    wanted = pinned(requirements(cell.set), pins)
    problem = install(interpreter, folder, wanted)
    if problem is not None:
        return Result("failed", sources, time.monotonic() - began, failures=[problem])
    python = folder / "bin" / "python"
    result = tested(python, folder, sources)
    installed = json.loads(_said(python, "-m", "pip", "list", "--format", "json") or "[]")
    direct = {canonicalize_name(Requirement(line).name) for line in wanted}
    versions = {each["name"]: each["version"] for each in installed if canonicalize_name(each["name"]) in direct}
    if result.outcome == "passed":
        shutil.rmtree(folder)
    return Result(**{**asdict(result), "versions": versions, "seconds": time.monotonic() - began})


def install(interpreter: str, folder: Path, wanted: Sequence[str]) -> str | None:
    """Make the environment; the reason where it cannot be had. torch goes first, so that a pin of it decides."""
    steps = [[interpreter, "-m", "venv", str(folder)]]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    torch = [line for line in wanted if Requirement(line).name == "torch"]
    steps += [[*pip, *torch], [*pip, "--prefer-binary", *wanted], [*pip, "--no-deps", "-e", str(ROOT)]]
    for step in steps:
        print(f"    {' '.join(step[-1:] if 'venv' in step else step[6:])[:110]}", flush=True)
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return " ".join(errors or done.stderr.splitlines()[-1:])[:600]
    return None


def tested(python: Path, folder: Path, sources: str) -> Result:
    """Run the chosen tests; every line that pytest ends with goes through."""
    files = sorted({file for files in TESTS.values() for file in files})
    log = folder.with_suffix(".log")
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--tb=short", *files]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, timeout=SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    text = log.read_text(errors="replace")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", text[-400:])}
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, flags=re.MULTILINE)
    if code and not failures:
        failures = [f"pytest ended with {code}: {log}"]
    bad = counts.get("failed", 0) + counts.get("errors", 0) + counts.get("error", 0)
    outcome = "passed" if code == 0 else "failed"
    return Result(outcome, sources, 0.0, counts.get("passed", 0), bad, counts.get("skipped", 0), failures)


def pinned(wanted: Sequence[str], pins: Sequence[str]) -> list[str]:
    """Requirements with those replaced that --pin names."""
    given = {Requirement(pin).name: pin for pin in pins}
    return [given.get(Requirement(line).name, line) for line in wanted]


def find_python(version: str) -> str | None:
    """An interpreter of a version: this one, one on PATH, or one of pyenv's."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    roots = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, reversed(roots))):
        if candidate and _said(candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip() == version:
            return candidate
    return None


def _said(*command: object) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False).stdout


def digest() -> str:
    """Of everything that a result depends on."""
    total = hashlib.sha256()
    for path in sorted([ROOT / "pyproject.toml", *(ROOT / "modelmill").rglob("*.*"), *(ROOT / "tests").rglob("*.py")]):
        if path.is_file() and "__pycache__" not in path.parts:
            total.update(path.read_bytes())
    return total.hexdigest()[:16]


def stored(cell: Cell, sources: str) -> Result | None:
    """The result of an earlier run that passed with the same sources."""
    try:
        result = Result(**json.loads((OUT / f"{cell.name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return result if (result.outcome, result.sources) == ("passed", sources) else None


def summary(result: Result) -> str:
    """One line."""
    counts = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped in {result.seconds:.0f} s"
    return f"{result.outcome}: {counts}" if result.seconds else result.outcome


def table(found: dict[Cell, Result]) -> str:
    """Markdown: the cells, what failed in them, and the versions of the sets."""
    lines = ["| cell | outcome | passed | failed | skipped | s |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for cell, each in found.items():
        outcome = each.outcome if cell.binds else f"{each.outcome} (does not bind)"
        lines.append(
            f"| {cell.name} | {outcome} | {each.passed} | {each.failed} | {each.skipped} | {each.seconds:.0f} |"
        )
    names = sorted({name for each in found.values() for name in each.versions}, key=str.lower)
    ran = [(cell, each) for cell, each in found.items() if each.versions]
    if ran:
        lines += ["", f"| package | {' | '.join(cell.name for cell, _ in ran)} |", f"| --- |{' --- |' * len(ran)}"]
        lines += [f"| {name} | {' | '.join(each.versions.get(name, '–') for _, each in ran)} |" for name in names]
    for cell, each in found.items():
        lines += [f"\n{cell.name}: {failure}" for failure in each.failures]
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="version_matrix", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--python", nargs="+", default=PYTHONS, choices=PYTHONS, help="Pythons (default: all)")
    parser.add_argument("--set", nargs="+", default=[], choices=SETS, help="sets of versions (default: all)")
    parser.add_argument("--pin", nargs="+", default=[], metavar="NAME==VERSION", help="what this machine can have")
    parser.add_argument("--again", action="store_true", help="run cells that passed, too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
