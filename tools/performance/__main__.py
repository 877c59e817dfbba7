"""``python -m tools.performance``: write docs/performance.md and its plots; ``--check`` only says what is stale."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.performance.page import stale, write

ROOT = Path(__file__).resolve().parent.parent.parent


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or with --check 1 where a file is not what the rows and the story give."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.check:
        old = stale(options.root)
        for name in old:
            print(f"{name} is stale; run `make performance`", file=sys.stderr)
        return 1 if old else 0
    for name in write(options.root):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
