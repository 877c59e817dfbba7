"""Run llama.cpp's server tests: ``python -m tools.peer_server_tests FOLDER --commit COMMIT``.

FOLDER is a checkout of llama.cpp; its tests run from there against ``modelmill serve``, and nothing
of it is copied. A test that does not pass and has no reason is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools import generated_page
from tools.peer_server_tests.reasons import find_reason
from tools.peer_server_tests.results import (
    FAILED,
    FILE,
    NOT_APPLICABLE,
    PASSED,
    count,
    save,
)
from tools.peer_server_tests.run_tests import run_tests
from tools.run_stamp import commit_and_date

MODEL = Path("../shared/data/models/stories260K")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if a failed test has no reason."""
    parser = argparse.ArgumentParser(prog="python -m tools.peer_server_tests", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of llama.cpp")
    parser.add_argument(
        "--only", action="append", default=[], help="a file of tests, as test_completion.py"
    )
    parser.add_argument("--commit", required=True, help="commit of the checkout, and its release")
    parser.add_argument("--model", type=Path, default=MODEL, help="stories260K's checkpoint")
    parser.add_argument("--save", action="store_true", help="for docs/llama_cpp_tests.md")
    options = parser.parse_args(argv)
    if options.save and options.only:
        parser.error("--save needs all tests")
    try:
        outcomes = run_tests(options.folder, options.model, options.only)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    print_failures(outcomes)
    results = count(options.commit, outcomes)
    results.measured_commit, results.date = commit_and_date(FILE)
    print(", ".join(f"{results.total(each)} {each}" for each in (PASSED, FAILED, NOT_APPLICABLE)))
    if options.save:
        save(generated_page.ROOT, results)
    return 1 if results.unexplained else 0


def print_failures(outcomes: Mapping[str, Mapping[str, str]]) -> None:
    """Print each test that does not pass, with its reason."""
    for test, outcome in outcomes.items():
        if outcome["outcome"] == PASSED:
            continue
        text = f"{outcome['outcome']}: {outcome['message']}"
        if outcome["outcome"] == FAILED:
            reason = find_reason(test, outcome)
            text = f"{reason.group.value}: {reason.text}" if reason else f"no reason: {text}"
            text += "".join(
                f"\n    {outcome[key]}" for key in ("line", "answer") if outcome.get(key)
            )
        print(f"{test}\n    {text}")


if __name__ == "__main__":
    raise SystemExit(main())
