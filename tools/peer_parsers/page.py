"""``python -m tools.peer_parsers.page``: write docs/parser_differences.md.

The counts are those of ``results.json``, the reasons those of ``explanations``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools import generated_page
from tools.peer_parsers.counts import PeerCounts
from tools.peer_parsers.explanations import EXPLANATIONS, Difference, Explanation, explain
from tools.peer_parsers.results_file import load_results
from tools.peer_parsers.run_tests import PEERS

PAGE = Path("docs/parser_differences.md")
HEAD = """# Parsers of answers beside vLLM's and SGLang's

vLLM and SGLang test their parsers of tool calls with strings of their own. `tools/peer_parsers`
runs these tests against modelmill's parsers. It takes a checkout of the peer, puts thin adapters in
the place of the peer's modules and runs the tests from where they are; nothing of the peer is
copied into this repository.

```bash
# counts by file, and every difference with its reason
python -m tools.peer_parsers vllm FOLDER --commit COMMIT
# the same, for this page, which `make parser-differences` writes
python -m tools.peer_parsers vllm FOLDER --commit COMMIT --save
```

A test is *compared* if it checks calls or content of a format that modelmill has. Tests of
something else (a peer's grammars, its request classes, its parser's inner state) are *internal*,
tests of formats that modelmill lacks count apart.

The peers' interfaces do not say where a streamed answer ends, and cut calls into deltas in several
ways. So a test may run several times: with and without an end, and with a call's name alone, with
its arguments, or as one piece. It passes if it passes in one of these ways. It never says that a
limit cut the answer, where modelmill leaves a begun mark out. Content is compared but for the
number of blanks between words, arguments as JSON, ids only where a test looks at them. vLLM does
not compare names with the declared functions, except for dots, K2 Horizon and MiniCPM5; its tests
may call any name here, too. A server of modelmill takes declared names only.

Some of SGLang's tests of calls also look at what waits in its parser: modelmill's has no such
state, so that look always succeeds, and calls and content decide. Some split the thinking off
first: SGLang's own parser of thinking does it. A test that asks no parser of calls is internal; the
run of vLLM 413ca1c3 is older than this rule, and may count up to four of them as passed.

"""
RUNS = """## Runs

*Same calls*: passed, or different only in content or in something that is neither. *Or elsewhere*:
with the tests whose calls differ, but where the peer itself returns modelmill's. For SGLang the run
finds this out: it streams the test's text, letter by letter, through SGLang's own detector of the
same commit, and compares names and arguments. For vLLM it is another of its tests. *Fails there*:
of the passed tests, those that the peer marks as failing with its own parser.

| peer | commit | compared | passed | fails there | same calls | or elsewhere | internal |\
 no format | not run | modelmill |
|---|---|---|---|---|---|---|---|---|---|---|
"""
REASONS = """
## Differences

Each test that does not pass belongs to one line; a new difference without a line fails the run.
The differences in calls are below 1 % of vLLM's tests since August. Of SGLang's they are not: seven
tests of whole answers differ. For four of these texts SGLang's own detectors stream modelmill's
call, so that its two ways contradict each other, and the test asks for one of them. The other three
they stream otherwise: without arguments, without a begun value, or with closing tags in a value.
Passing the seven would lose calls of users, or make a whole answer differ from the same answer in a
stream, so they stay.

| what differs | tests | why | where the peer does as modelmill |
|---|---|---|---|
"""
FILES = """
## Files of tests

Compared tests with the same calls, of all compared ones. Files without a compared test are left
out.

| file | {titles} |
|---|{lines}|
"""

STREAMED = "SGLang's own detector streams modelmill's call for the same text"


def render(root: Path = generated_page.ROOT) -> dict[Path, str]:
    """The page by its path below the repository."""
    results = load_results(root / "tools/peer_parsers/results.json")
    text = HEAD + RUNS + _rows(map(_run, results))
    text += REASONS + _rows(_reasons(results))
    titles = " | ".join(f"{PEERS[each.peer].title} {each.commit}" for each in results)
    text += FILES.format(titles=titles, lines="|".join("---" for _ in results))
    return {PAGE: text + _rows(_files(results))}


def _rows(rows: Iterator[Sequence[object]]) -> str:
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def _run(counts: PeerCounts) -> Sequence[object]:
    return (
        PEERS[counts.peer].title,
        counts.commit,
        counts.compared,
        counts.total("passed", "xpassed"),
        counts.total("xpassed"),
        _share(counts.same_calls, counts.compared),
        _share(counts.same_elsewhere, counts.compared),
        counts.total("internal"),
        counts.total("no format"),
        counts.total("skipped", "not collected", "xfailed"),
        f"`{counts.measured_commit}`, {counts.date}",
    )


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.1f} %)"


def _reasons(results: Sequence[PeerCounts]) -> Iterator[Sequence[object]]:
    for difference in Difference:
        for explanation in EXPLANATIONS:
            if explanation.difference == difference:
                number = _number(results, explanation)
                reason = _sentence(explanation.reason)
                yield difference.value, number, reason, _elsewhere(results, explanation)


def _elsewhere(results: Sequence[PeerCounts], explanation: Explanation) -> str:
    """Where the peer returns modelmill's calls for all tests of a difference."""
    tests = [(each, test) for each in results for test in each.failed]
    tests = [(each, test) for each, test in tests if explain(test) is explanation]
    if tests and all(test in each.streamed for each, test in tests):
        return STREAMED
    return _sentence(explanation.elsewhere)


def _number(results: Sequence[PeerCounts], explanation: Explanation) -> int:
    """How many tests of all runs show a difference."""
    return sum(explain(test) is explanation for each in results for test in each.failed)


def _sentence(text: str) -> str:
    return text if text.startswith("vLLM") else text[:1].upper() + text[1:]


def _files(results: Sequence[PeerCounts]) -> Iterator[Sequence[object]]:
    names = sorted({name for each in results for name in each.files})
    for name in names:
        cells = [_cell(each, name) for each in results]
        if any(cells):
            yield f"`{name}`", *cells


def _cell(counts: PeerCounts, name: str) -> str:
    outcomes = counts.files.get(name, {})
    compared = sum(outcomes.get(each, 0) for each in ("passed", "xpassed", "failed"))
    failed = [test for test in counts.failed if test.partition("::")[0] == name]
    part = PeerCounts(counts.peer, counts.commit, {name: outcomes}, failed)
    return f"{part.same_calls} of {compared}" if compared else ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return generated_page.run_pages(argv, __doc__, "parser-differences", render)


if __name__ == "__main__":
    sys.exit(main())
