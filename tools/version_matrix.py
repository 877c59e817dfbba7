"""``make test-versions``: test both ends of pyproject.toml's ranges, each in a new environment.

A cell is a Python and a set of versions: ``oldest`` (every lower end, all at once), ``newest``
(what a plain install takes within the ranges), ``core`` (newest, no extra: the tests of what is
absent must be skipped) and ``next`` (newest without upper ends: what a wider range would let in; it
may fail, and then shows why the range ends). Only ``oldest`` and ``newest`` bind.

Resumable: a cell that passed with the same sources is not run again (--again runs it). The
environment of a cell that passed is removed (--keep keeps it); that of one that failed is left, to
look into. One that is left is used again while it is to hold the same. --write FILE writes the
table as a page. Standard library and ``packaging`` only.
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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "versions"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLD_PYTHON = PYTHONS[0]  # old versions have no wheels for a Python that came after them
VERSION_SETS = ("oldest", "newest", "core", "next")
EXTRAS = ("gpu", "eval", "report", "serve", "otel", "test")
# they check the sources: their versions are no user's matter
TOOLS = ("ruff", "mypy", "clang-format", "types-PyYAML", "types-psutil")
TIMEOUT_SECONDS = 3600.0
READY = ".ready"
MOST = 20  # failures of a cell that are shown by name

TESTS = {
    "torch": ("tests/nn/test_step.py", "tests/runtime/test_sampler.py", "tests/test_llm.py"),
    "numpy": ("tests/weights/test_int4.py", "tests/artifact/test_shard.py"),
    "safetensors": ("tests/checkpoint/test_safetensors.py",),
    "tokenizers": ("tests/text/test_tokenizer_loader.py",),
    "tiktoken": ("tests/text/test_tiktoken_tokenizer.py",),
    "sentencepiece": ("tests/text/test_sentencepiece_tokenizer.py",),
    "jinja2": ("tests/text/test_chat_format_loader.py",),
    "huggingface_hub": ("tests/checkpoint/test_pull.py",),
    "psutil": ("tests/core/test_memory_limits.py",),
    "packaging": ("tests/core/test_packages.py",),
    "pillow": ("tests/vision/test_image.py",),
    "pyyaml": ("tests/core/test_config.py",),
    "typer and rich": (
        "tests/cli/test_main.py",
        "tests/cli/test_options.py",
        "tests/cli/test_verbs.py",
    ),
    "triton": ("tests/ops/test_sample.py", "tests/ops/test_fast_launch.py"),
    "rouge-score": ("tests/eval/test_rouge.py",),
    "transformers": (
        "tests/models/test_hf_config.py",
        "tests/benchmarks/test_synthetic_shapes.py",
        "tests/eval/test_hf_reference.py",
    ),
    "matplotlib": ("tests/eval/test_report.py", "tests/eval/test_checkpoint_comparison.py"),
    "fastapi, uvicorn and pydantic": (
        "tests/serve/test_openai_format.py",
        "tests/serve/test_validation_errors.py",
    ),
    "openai": ("tests/serve/test_server.py",),
    "prometheus-client": ("tests/serve/test_engine_client.py",),
    "llguidance": ("tests/text/test_grammar.py",),
    "opentelemetry": ("tests/serve/test_traces.py",),
    "gguf": ("tests/checkpoint/test_gguf.py",),
}
"""For each library the tests in which it does its work: not all of the suite, which tests our own
code for hours.
"""

PAGE = """# Tested versions

The ranges in `pyproject.toml` end where tests end, and a plain `pip install` keeps to them. `modelmill doctor` names a
version outside: it may well work, but it is not tested.

`oldest` is the lower end of every range, all at once; `newest` what a plain install takes; `core` the newest without an
extra; `next` the newest without upper ends, to see what a wider range would let in (where nothing is newer, it repeats
`newest`). All run on a CPU (Triton in its interpreter). A nightly workflow runs the same. How to let a new version in:
[CONTRIBUTING.md](../CONTRIBUTING.md).

`make test-versions PAGE=docs/versions.md` wrote this (s: seconds for the tests, and for the environment where none was
left of an earlier run):

{table}
"""  # noqa: E501


class MatrixCell(NamedTuple):
    """One environment."""

    python: str
    version_set: str

    @property
    def name(self) -> str:
        """Return the cell's name, as in file names and tables."""
        return f"{self.python}-{self.version_set}"

    @property
    def required(self) -> bool:
        """Whether its failure fails the matrix."""
        return self.version_set != "next"


@dataclass(frozen=True)
class CellResult:
    """Result of a cell.

    outcome: passed, failed, or why it could not run. versions: name → installed.

    commit, date: of the run; a result is kept for as long as the sources are the same.
    """

    outcome: str
    sources: str
    seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    date: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 if every required cell that could run passed, else 1."""
    options = _parse(argv)
    OUT.mkdir(parents=True, exist_ok=True)
    sources, results = digest(), {}
    cells = [
        cell
        for cell in make_cells(options.python)
        if not options.set or cell.version_set in options.set
    ]
    for place, cell in enumerate(cells, 1):
        print(f"[{place}/{len(cells)}] {cell.name}", flush=True)
        stored = None if options.again else stored_result(cell, sources)
        results[cell] = stored or with_date(run(cell, sources, options.pin, options.keep))
        if stored is None:
            (OUT / f"{cell.name}.json").write_text(json.dumps(asdict(results[cell]), indent=1))
        print(f"    {summary(results[cell])}{' (kept)' if stored else ''}", flush=True)
    print("\n" + table(results))
    if options.write is not None:
        options.write.write_text(page(results))
    bad = any(result.outcome == "failed" and cell.required for cell, result in results.items())
    return (
        1
        if bad or not any(result.outcome in ("passed", "failed") for result in results.values())
        else 0
    )


def with_date(result: CellResult) -> CellResult:
    """The result with the commit that is checked out, and today."""
    commit = _output("git", "-C", ROOT, "rev-parse", "--short", "HEAD").strip()
    return replace(result, commit=commit, date=time.strftime("%Y-%m-%d", time.gmtime()))


def make_cells(pythons: Iterable[str]) -> list[MatrixCell]:
    """Return the cells: both ends on the oldest Python, newest on all, core and next on one."""
    chosen = list(pythons)
    cells = [MatrixCell(OLD_PYTHON, "oldest")] if OLD_PYTHON in chosen else []
    cells += [MatrixCell(python, "newest") for python in chosen]
    return [*cells, MatrixCell(chosen[0], "core"), MatrixCell(chosen[-1], "next")]


def requirements(which: str) -> list[str]:
    """What pip is to install for a set, as lines; torch is the first."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    lines = list(project["dependencies"])
    lines += [line for line in extras["test"] if line.startswith("pytest")] if which == "core" else [  # noqa: E501
        line for extra in EXTRAS for line in extras[extra]
    ]  # fmt: skip
    versions = {}
    for line in lines:
        requirement = Requirement(line)
        if requirement.name not in TOOLS:
            versions[requirement.name] = {"oldest": oldest, "next": without_upper_bound}.get(
                which, str
            )(requirement)
    return list(versions.values())


def oldest(requirement: Requirement) -> str:
    """``name==lower end``. Raises ValueError for a range without one."""
    for part in requirement.specifier:
        if part.operator in (">=", "=="):
            return f"{_package_name(requirement)}=={part.version}"
    raise ValueError(f"{requirement} has no lower end")


def without_upper_bound(requirement: Requirement) -> str:
    """The range without its upper end."""
    lower_bounds = [
        str(part) for part in requirement.specifier if not part.operator.startswith("<")
    ]
    return f"{_package_name(requirement)}{','.join(lower_bounds)}"


def _package_name(requirement: Requirement) -> str:
    return requirement.name + (
        f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    )


def run(cell: MatrixCell, sources: str, pins: Sequence[str], keep: bool = False) -> CellResult:
    """A fresh environment, the tests in it, and what came of both."""
    began = time.monotonic()
    interpreter = find_python(cell.python)
    if interpreter is None:
        return CellResult(f"no Python {cell.python} here", sources)
    folder = OUT / cell.name
    packages = apply_pins(requirements(cell.version_set), pins)
    problem = None if ready(folder, packages) else install(interpreter, folder, packages)
    if problem is not None:
        return CellResult("failed", sources, time.monotonic() - began, failures=[problem])
    python = folder / "bin" / "python"
    versions = versions_of(python, packages)
    twin = (
        stored_result(MatrixCell(cell.python, "newest"), sources)
        if cell.version_set == "next"
        else None
    )
    if (
        twin is not None and twin.versions == versions
    ):  # nothing is newer than the ranges: the same tests passed already
        result = twin
    else:
        result = run_tests(python, folder, sources)
    if result.outcome == "passed" and not keep:
        shutil.rmtree(folder)
    return replace(result, versions=versions, seconds=time.monotonic() - began)


def versions_of(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Return name → version of Python and of the requested packages, without their dependencies."""
    installed = json.loads(_output(python, "-m", "pip", "list", "--format", "json") or "[]")
    direct = {canonicalize_name(Requirement(line).name) for line in packages}
    versions = {
        "Python": _output(python, "-c", "import platform; print(platform.python_version())").strip()
    }
    return versions | {
        each["name"]: each["version"]
        for each in installed
        if canonicalize_name(each["name"]) in direct
    }


def ready(folder: Path, packages: Sequence[str]) -> bool:
    """Return whether an earlier run completed an environment with the same packages."""
    try:
        return (folder / READY).read_text() == "\n".join(packages)
    except OSError:
        return False


def install(interpreter: str, folder: Path, packages: Sequence[str]) -> str | None:
    """Make the environment; the reason where it cannot be had.

    torch goes first, so that a pin of it decides.
    """
    shutil.rmtree(folder, ignore_errors=True)
    steps = [[interpreter, "-m", "venv", str(folder)]]
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    torch = [line for line in packages if Requirement(line).name == "torch"]
    steps += [
        [*pip, *torch],
        [*pip, "--prefer-binary", *packages],
        [*pip, "--no-deps", "-e", str(ROOT)],
    ]
    for step in steps:
        print(f"    {' '.join(step[-1:] if 'venv' in step else step[7:])[:110]}", flush=True)
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return " ".join(errors or done.stderr.splitlines()[-1:])[:600]
    (folder / READY).write_text("\n".join(packages))
    return None


def run_tests(python: Path, folder: Path, sources: str) -> CellResult:
    """Run the chosen tests; every line that pytest ends with goes through."""
    files = sorted({file for files in TESTS.values() for file in files})
    log = folder.parent / f"{folder.name}.log"  # with_suffix would take ".11-oldest" for one
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--tb=short", *files]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=TIMEOUT_SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    text = log.read_text(errors="replace")
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", text[-400:])
    }
    failures = re.findall(
        r"^(?:FAILED|ERROR) (tests/[^[\n]*?(?:\[.*?\])?)(?: - .*)?$", text, flags=re.MULTILINE
    )
    if code and not failures:
        failures = [f"pytest ended with {code}: {log}"]
    bad = counts.get("failed", 0) + counts.get("errors", 0) + counts.get("error", 0)
    outcome = "passed" if code == 0 else "failed"
    return CellResult(
        outcome,
        sources,
        passed=counts.get("passed", 0),
        failed=bad,
        failures=failures,
        skipped=counts.get("skipped", 0),
    )


def apply_pins(packages: Sequence[str], pins: Sequence[str]) -> list[str]:
    """Requirements with those replaced that --pin names."""
    pinned = {Requirement(pin).name: pin for pin in pins}
    return [pinned.get(Requirement(line).name, line) for line in packages]


def find_python(version: str) -> str | None:
    """An interpreter of a version: this one, one on PATH, or one of pyenv's."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    roots = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, reversed(roots))):
        if (
            candidate
            and _output(
                candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"
            ).strip()
            == version
        ):
            return candidate
    return None


def _output(*command: object) -> str:
    """What a command prints; nothing where it is not here (a slim machine has no git)."""
    try:
        return subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return ""


def digest() -> str:
    """Of everything that a result depends on."""
    total = hashlib.sha256()
    for path in sorted(
        [
            ROOT / "pyproject.toml",
            *(ROOT / "modelmill").rglob("*.*"),
            *(ROOT / "tests").rglob("*.py"),
        ]
    ):
        if path.is_file() and "__pycache__" not in path.parts:
            total.update(path.read_bytes())
    return total.hexdigest()[:16]


def stored_result(cell: MatrixCell, sources: str) -> CellResult | None:
    """The result of an earlier run that passed with the same sources."""
    try:
        result = CellResult(**json.loads((OUT / f"{cell.name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return result if (result.outcome, result.sources) == ("passed", sources) else None


def summary(result: CellResult) -> str:
    """One line."""
    counts = (
        f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped in "
        f"{result.seconds:.0f} s"
    )
    return f"{result.outcome}: {counts}" if result.seconds else result.outcome


def table(results: dict[MatrixCell, CellResult]) -> str:
    """Markdown: the cells, the versions in them beside the tested range, and what failed."""
    lines = [
        "| cell | outcome | passed | failed | skipped | s | commit | date |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for cell, each in results.items():
        outcome = each.outcome if cell.required else f"{each.outcome} (does not bind)"
        lines.append(
            f"| {cell.name} | {outcome} | {each.passed} | {each.failed} | {each.skipped} | "
            f"{each.seconds:.0f} "
            f"| {each.commit} | {each.date} |"
        )
    ranges, ran = tested_ranges(), [(cell, each) for cell, each in results.items() if each.versions]
    names = sorted({canonicalize_name(name) for _, each in ran for name in each.versions})
    if ran:
        lines += ["", f"| package | range | {' | '.join(cell.name for cell, _ in ran)} |"]
        lines += [f"| --- | --- |{' --- |' * len(ran)}"]
    for name in names:
        row = [
            {canonicalize_name(key): value for key, value in each.versions.items()}.get(name, "–")
            for _, each in ran
        ]
        lines.append(f"| {name} | {ranges.get(name, '')} | {' | '.join(row)} |")
    for cell, each in results.items():
        lines += [f"\n{cell.name}: {failure}" for failure in each.failures[:MOST]]
        if len(each.failures) > MOST:
            lines.append(
                f"\n{cell.name}: and {len(each.failures) - MOST} more, in "
                f"{OUT.name}/{cell.name}.log"
            )
    return "\n".join(lines)


def tested_ranges() -> dict[str, str]:
    """Of each package, and of Python, the range that pyproject.toml gives: ``>=2.11, <2.16``."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in EXTRAS for line in project["optional-dependencies"][extra]),
    ]
    ranges = {"python": Requirement(f"python{project['requires-python']}")}
    ranges |= {canonicalize_name(each.name): each for each in map(Requirement, lines)}
    return {
        name: ", ".join(sorted(map(str, each.specifier), key=lambda part: not part.startswith(">")))
        for name, each in ranges.items()
    }


def page(results: dict[MatrixCell, CellResult]) -> str:
    """The table as a page of the documentation."""
    return PAGE.format(table=table(results))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="version_matrix", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument(
        "--python", nargs="+", default=PYTHONS, choices=PYTHONS, help="Pythons (default: all)"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], choices=VERSION_SETS, help="sets of versions (default: all)"
    )
    parser.add_argument(
        "--pin", nargs="+", default=[], metavar="NAME==VERSION", help="what this machine can have"
    )
    parser.add_argument("--again", action="store_true", help="run cells that passed, too")
    parser.add_argument(
        "--keep", action="store_true", help="keep the environments of cells that passed, too"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="the table as a page of the documentation"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
