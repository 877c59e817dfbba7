"""Run a peer's parser tests: ``python -m tools.peer_parsers vllm FOLDER --commit COMMIT``.

FOLDER is a checkout of vLLM or SGLang; its tests run from there against modelmill's parsers, and
nothing of it is copied. A test that does not pass and has no explanation is an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.generated_page import ROOT
from tools.peer_parsers.counts import PeerCounts, answers_that_differ, count_outcomes
from tools.peer_parsers.explanations import explain
from tools.peer_parsers.own_streams import find_streamed
from tools.peer_parsers.results_file import PATH, load_results, save_results
from tools.peer_parsers.run_tests import PEERS, run_tests
from tools.run_stamp import commit_and_date


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if a difference has no explanation."""
    parser = argparse.ArgumentParser(prog="python -m tools.peer_parsers", description=__doc__)
    parser.add_argument("peer", choices=PEERS, help="whose tests")
    parser.add_argument("folder", type=Path, help="its checkout")
    parser.add_argument("--commit", required=True, help="commit of the checkout, and its date")
    parser.add_argument("--save", action="store_true", help="for docs/parser_differences.md")
    options = parser.parse_args(argv)
    try:
        outcomes = run_tests(options.peer, options.folder)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    counts = count_outcomes(options.peer, options.commit, outcomes)
    counts.measured_commit, counts.date = commit_and_date(PATH.relative_to(ROOT))
    if options.peer == "sglang":
        package = options.folder / PEERS[options.peer].package
        counts.streamed = find_streamed(package, answers_that_differ(outcomes))
    print_counts(counts)
    if options.save:
        others = [each for each in load_results() if each.commit != options.commit]
        save_results([*others, counts])
    return 1 if any(explain(test) is None for test in counts.failed) else 0


def print_counts(counts: PeerCounts) -> None:
    """Print counts by file, and the tests that do not pass."""
    for name, outcomes in counts.files.items():
        print(f"{name}: {', '.join(f'{number} {each}' for each, number in outcomes.items())}")
    for test in counts.failed:
        explanation = explain(test)
        reason = "no explanation"
        if explanation is not None:
            reason = f"{explanation.difference.value}: {explanation.reason}"
        print(f"{test}\n    {reason}")
        if test in counts.streamed:
            print("    the peer streams modelmill's calls for its text")
    print(f"{counts.compared} tests compared, {counts.same_calls} with the same calls")


if __name__ == "__main__":
    raise SystemExit(main())
