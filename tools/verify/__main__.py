"""``python -m tools.verify``: run the items, then write docs/verification.md."""

from __future__ import annotations

import argparse
import datetime
import importlib
import pkgutil
import platform
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

from modelmill.eval.provenance import git_commit
from tools import verify
from tools.verify import report, result
from tools.verify.context import ROOT, VerifyContext
from tools.verify.result import Fact, VerifyResult

PACKAGE = ROOT / "modelmill"
DOCUMENT = ROOT / "docs" / "verification.md"
PAGES = "docs/verification*.md"


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 if every item passed, 1 if one failed, 2 if none can run."""
    options = _parse(argv)
    shared = ROOT.parent / "shared"
    if not (shared / "data").is_dir():
        print(f"verify: needs the shared data folder at {shared}; it is absent", file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))
    items = find_items()
    unknown = sorted(set(options.only) - set(items))
    if unknown:
        print(
            f"verify: no item {', '.join(unknown)}; there are {', '.join(items)}", file=sys.stderr
        )
        return 2
    context = VerifyContext(options.out.resolve(), shared, result.source_digest(PACKAGE))
    results = {number: _run_item(number, item, context, options) for number, item in items.items()}
    DOCUMENT.parent.mkdir(exist_ok=True)
    rendered = {number: (items[number].TITLE, each) for number, each in results.items()}
    page_before = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    for name, text in report.render(rendered, page_before).items():
        (DOCUMENT.parent / name).write_text(text)
        context.log(f"wrote {(DOCUMENT.parent / name).relative_to(ROOT)}")
    bad = [n for n, r in results.items() if r is not None and not r.ok]
    missing = [n for n, r in results.items() if r is None]
    if bad:
        context.log(f"FAILED: item {', '.join(bad)}")
    if missing:
        context.log(f"not run for these sources: item {', '.join(missing)}")
    return 1 if bad or (missing and not options.only) else 0


def find_items() -> dict[str, ModuleType]:
    """Number → module, for every item_<n>_<name>.py beside this file."""
    names = sorted(
        m.name for m in pkgutil.iter_modules(verify.__path__) if m.name.startswith("item_")
    )
    return {name.split("_")[1]: importlib.import_module(f"tools.verify.{name}") for name in names}


def _run_item(
    number: str, item: ModuleType, context: VerifyContext, options: argparse.Namespace
) -> VerifyResult | None:
    """Return the item's result: the stored one if it is of these sources, else a new one.

    Of an item that is not selected the last result, of whatever sources; None: it never ran here,
    and stays as it stands on the page.
    """
    assert item.__file__ is not None
    current = result.source_digest(
        PACKAGE, Path(item.__file__), Path(__file__).with_name("context.py")
    )
    path = context.out / f"item_{number}.json"
    selected = not options.only or number in options.only
    stored = result.load(path, current)
    if stored is not None and not (selected and options.force):
        context.log(
            f"item {number}: {item.TITLE}: {'ok' if stored.ok else 'FAILED'} (of {stored.date})"
        )
        return stored
    if not selected:
        return result.of_older_code(result.load(path))
    context.log(f"item {number}: {item.TITLE}")
    began = time.perf_counter()
    try:
        outcome: VerifyResult = item.run(context)
    except Exception as error:
        traceback.print_exc()
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        outcome = VerifyResult(False, [Fact("runs to its end", line, False)])
    outcome.seconds, outcome.digest = time.perf_counter() - began, current
    outcome.date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    outcome.command = outcome.command or f"python -m tools.verify --only {number}"
    outcome.commit = git_commit(ROOT, written=PAGES) or ""
    outcome.versions, outcome.device = versions(), device()
    result.store(outcome, path)
    context.log(f"item {number}: {'ok' if outcome.ok else 'FAILED'} in {outcome.seconds:.0f} s")
    return outcome


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    import torch
    import transformers

    import modelmill

    return {
        "modelmill": modelmill.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def device() -> str:
    """The CPU, in words."""
    import psutil

    info = Path("/proc/cpuinfo")
    model = ""
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else ""
    return f"{model or platform.processor() or platform.machine()}, {psutil.cpu_count()} cores"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description=__doc__)
    parser.add_argument(
        "--only", type=_list, default=[], metavar="1,6", help="run these items alone"
    )
    parser.add_argument("--force", action="store_true", help="run again what has a stored result")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "verify", help="where results are kept"
    )
    return parser.parse_args(argv)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
