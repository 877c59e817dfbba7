"""``python -m tools.conformance``: run the suites, then write docs/conformance.md."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from modelmill.eval.provenance import git_commit
from tools import conformance
from tools.conformance import report, server, suite
from tools.conformance.suite import FailedCheck, SuiteResult
from tools.verify.__main__ import device
from tools.verify.result import source_digest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "modelmill"
DOCUMENT = ROOT / "docs" / "conformance.md"


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 where every suite is green, 1 where one is not, 2 for a name that is none."""
    options = _parse(argv)
    suites = find_suites()
    unknown = sorted(set(options.only) - set(suites))
    if unknown:
        print(
            f"conformance: no suite {', '.join(unknown)}; there are {', '.join(suites)}",
            file=sys.stderr,
        )
        return 2
    with contextlib.ExitStack() as stack:
        where = _lazy_server(stack, options)
        results = {
            name: _run_suite(name, module, where, options) for name, module in suites.items()
        }
    DOCUMENT.parent.mkdir(exist_ok=True)
    page_before = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    titled = {name: (suites[name].TITLE, each) for name, each in results.items()}
    DOCUMENT.write_text(report.render(titled, device(), page_before), encoding="utf-8")
    _log(f"wrote {DOCUMENT}")
    bad = [name for name, result in results.items() if result is not None and not result.ok]
    missing = [name for name, result in results.items() if result is None or result.stale]
    if bad:
        _log(f"FAILED: {', '.join(bad)}")
    if missing:
        _log(f"not run for these sources: {', '.join(missing)}")
    return 1 if bad or (missing and not options.only) else 0


def find_suites() -> dict[str, ModuleType]:
    """Name → module, for every file of this folder that has ``run``."""
    names = sorted(
        m.name for m in pkgutil.iter_modules(conformance.__path__) if not m.name.startswith("_")
    )
    modules = {name: importlib.import_module(f"tools.conformance.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "run")}


def _lazy_server(
    stack: contextlib.ExitStack, options: argparse.Namespace
) -> Callable[[], tuple[str, str]]:
    """Return a function that starts the server on its first call and gives (base URL, model)."""
    started: list[tuple[str, str]] = [(options.url, options.model)] if options.url else []

    def where() -> tuple[str, str]:
        if not started:
            _log("starting the server")
            url = stack.enter_context(
                server.serve_engine(server.engine(options.out), options.out / "server.log")
            )
            started.append((url, server.MODEL))
        return started[0]

    return where


def _run_suite(
    name: str,
    module: ModuleType,
    server_address: Callable[[], tuple[str, str]],
    options: argparse.Namespace,
) -> SuiteResult | None:
    """Return the suite's result: stored if unchanged, else new; None if not selected."""
    assert module.__file__ is not None
    current = source_digest(PACKAGE, Path(module.__file__)) + version_of(module.PACKAGE)
    path = options.out / f"{name}.json"
    selected = not options.only or name in options.only
    stored = suite.load(path, current)
    if stored is not None and not (selected and (options.force or not stored.ok)):
        _log(f"{name}: {_result_line(stored)} (of {stored.date})")
        return stored
    if not selected:
        return _stale_result(path)
    _log(f"{name}: {module.TITLE}")
    began = time.perf_counter()
    folder = options.out / name
    folder.mkdir(parents=True, exist_ok=True)
    base_url, model = server_address()
    try:
        result: SuiteResult = module.run(base_url, model, folder)
    except Exception as error:
        traceback.print_exc()
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        result = SuiteResult(0, [FailedCheck("runs to its end", line)])
    result.seconds, result.digest = time.perf_counter() - began, current
    result.commit = git_commit(ROOT, written=f"docs/{DOCUMENT.name}") or ""
    result.date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    result.title, result.package = module.TITLE, module.PACKAGE
    result.version = result.version or version_of(module.PACKAGE)
    suite.store(result, path)
    _log(f"{name}: {_result_line(result)} in {result.seconds:.0f} s")
    for case in result.failed:
        _log(f"  FAILED {case.name}: {case.reason}")
    return result


def _stale_result(path: Path) -> SuiteResult | None:
    """Return the result of older sources, marked as stale."""
    stored = suite.load(path)
    if stored is not None:
        stored.stale = True
    return stored


def version_of(package: str) -> str:
    """The installed version of a Python distribution; empty where it is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _result_line(result: SuiteResult) -> str:
    return f"{result.passed} passed, {len(result.failed)} failed, {len(result.excluded)} excluded"


def _log(text: str) -> None:
    print(f"[{datetime.datetime.now(datetime.UTC):%H:%M:%S}] {text}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=__doc__)
    parser.add_argument(
        "--only",
        type=_list,
        default=[],
        metavar="openai_client,schema",
        help="run these suites alone",
    )
    parser.add_argument("--force", action="store_true", help="run again what has a kept result")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "conformance", help="where results are kept"
    )
    parser.add_argument(
        "--url", default="", metavar="http://HOST:PORT/v1", help="a server that runs already"
    )
    parser.add_argument("--model", default=server.MODEL, help="its model's name")
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    return options


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
