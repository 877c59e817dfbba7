"""Checks random conversations in every chat format: ``python -m tools.chat_formats --count N``.

Each is written, read whole and in random pieces, written back, and read cut off at a random place.
With ``--progress FILE`` a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from modelmill.text.chat_format_files import format_names
from tools.chat_formats.progress_file import ProgressFile
from tools.chat_formats.run_checks import FormatRun, run_format

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the checks; returns 1 if one fails, 130 if the run was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tools.chat_formats", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="answers per format")
    parser.add_argument("--seed", type=int, default=0, help="of the first answer")
    parser.add_argument("--format", nargs="*", default=format_names(), help="names of formats")
    parser.add_argument("--progress", type=Path, help="file of what has been checked")
    options = parser.parse_args(argv)
    progress = ProgressFile(options.progress)
    failures = 0
    try:
        for name in options.format:
            run = progress.get(name, options.seed)
            for _ in run_format(run, options.count):
                progress.save()
                if sys.stdout.isatty():
                    print(f"\r{_line(run)}", end="", flush=True)
            progress.save()
            print(("\r" if sys.stdout.isatty() else "") + _line(run), flush=True)
            failures += len(run.failures)
            for failure in run.failures:
                print(f"{name}: {failure}", file=sys.stderr)
    except KeyboardInterrupt:
        progress.save()
        print("\ninterrupted; the same command with --progress goes on", file=sys.stderr)
        return INTERRUPTED
    return 1 if failures else 0


def _line(run: FormatRun) -> str:
    rate = run.checked / run.cpu_seconds if run.cpu_seconds else 0.0
    return (
        f"{run.name}: {run.checked} answers, {run.cpu_seconds:.1f} s of CPU time, "
        f"{rate:.0f} a second, {len(run.failures)} failures"
    )


if __name__ == "__main__":
    raise SystemExit(main())
