"""Checks random conversations in every chat format: ``python -m tools.chat_formats --count N``.

Each is written, read whole and in random pieces, written back, and read cut off at a random place.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from modelmill.text.chat_format_files import format_names, load_format
from tools.chat_formats.check_answers import check_answer


def main() -> int:
    """Run the checks; returns 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.chat_formats", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="answers per format")
    parser.add_argument("--seed", type=int, default=0, help="of the first answer")
    parser.add_argument("--format", nargs="*", default=format_names(), help="names of formats")
    options = parser.parse_args()
    failures = 0
    for name in options.format:
        syntax, start = load_format(name), time.perf_counter()
        for number in range(options.seed, options.seed + options.count):
            try:
                check_answer(syntax, random.Random(f"{name} {number}"))
            except AssertionError as error:
                failures += 1
                print(f"{name}: seed {number}: {error}", file=sys.stderr)
                break
            if sys.stdout.isatty() and number % 1000 == 0:
                print(f"\r{name}: {number - options.seed} of {options.count}", end="", flush=True)
        seconds = time.perf_counter() - start
        print(f"\r{name}: {number - options.seed + 1} answers in {seconds:.1f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
