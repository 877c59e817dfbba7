"""Checks random conversations in every chat format: ``python -m tools.chat_formats --count N``.

Each is written, read whole and in random pieces, written back, and read cut off at a random place.
With ``--progress FILE`` a run that was interrupted goes on where it was. Answer N of a format is
always the same; ``--jobs`` does not change what is checked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from modelmill.text.chat_format_registry import list_chat_formats
from tools.chat_formats.parallel_runs import run_formats
from tools.chat_formats.passed_runs import save_passed
from tools.chat_formats.progress_file import ProgressFile
from tools.chat_formats.run_checks import FormatRun, is_complete, run_format

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the checks; returns 1 if one fails, 130 if the run was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tools.chat_formats", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="answers per format")
    parser.add_argument("--seed", type=int, default=0, help="of the first answer")
    parser.add_argument("--format", nargs="*", default=list_chat_formats(), help="names of formats")
    parser.add_argument("--progress", type=Path, help="file of what has been checked")
    parser.add_argument("--save", action="store_true", help="for docs/chat-formats.md")
    parser.add_argument("--jobs", type=int, default=1, help="formats that are checked at once")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, not {options.jobs}")
    progress = ProgressFile(options.progress)
    try:
        check = _check_one_by_one if options.jobs == 1 else _check_at_once
        check(options, progress)
    except KeyboardInterrupt:
        progress.save()
        print("\ninterrupted; the same command with --progress goes on", file=sys.stderr)
        return INTERRUPTED
    if options.save:
        save_passed(progress.get(each, options.seed) for each in options.format)
    return 1 if any(progress.get(each, options.seed).failures for each in options.format) else 0


def _check_one_by_one(options: argparse.Namespace, progress: ProgressFile) -> None:
    for name in options.format:
        run = progress.get(name, options.seed)
        for _ in run_format(run, options.count):
            progress.save()
            if sys.stdout.isatty():
                print(f"\r{_line(run)}", end="", flush=True)
        progress.save()
        _print_result(run)


def _check_at_once(options: argparse.Namespace, progress: ProgressFile) -> None:
    runs = [progress.get(name, options.seed) for name in options.format]
    for run in runs:
        if is_complete(run, options.count):
            _print_result(run)
    for run in run_formats(runs, options.count, options.jobs):
        progress.put(run)
        progress.save()
        if is_complete(run, options.count):
            _print_result(run)


def _print_result(run: FormatRun) -> None:
    print(("\r" if sys.stdout.isatty() else "") + _line(run), flush=True)
    for failure in run.failures:
        print(f"{run.name}: {failure}", file=sys.stderr)


def _line(run: FormatRun) -> str:
    rate = run.checked / run.cpu_seconds if run.cpu_seconds else 0.0
    return (
        f"{run.name}: {run.checked} answers, {run.cpu_seconds:.1f} s of CPU time, "
        f"{rate:.0f} a second, {len(run.failures)} failures"
    )


if __name__ == "__main__":
    raise SystemExit(main())
