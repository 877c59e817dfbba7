"""The command line of a tool that writes pages from rows: write them, or say which are stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(
    argv: Sequence[str] | None, description: str | None, target: str,
    stale: Callable[[Path], Iterable[object]], write: Callable[[Path], Iterable[object]],
) -> int:  # fmt: skip
    """Exit code: 0, or with --check 1 where a file is not what its template and rows give.

    description: what the tool does; target: of make, which writes. stale and write name the files,
    below a root.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.check:
        for name in write(options.root):
            print(name)
        return 0
    old = list(stale(options.root))
    for name in old:
        print(f"{name} is stale; run `make {target}`", file=sys.stderr)
    return 1 if old else 0
