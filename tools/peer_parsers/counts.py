"""Counts of a run by file of tests, and the tests that do not pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.peer_parsers.asked_answers import AskedAnswer
from tools.peer_parsers.explanations import Difference, explain, short_name

NO_FORMAT = "no chat format stands for this"
"""Begin of the message where a test's format is none of modelmill's."""


@dataclass
class PeerCounts:
    """What became of a peer's tests.

    Attributes:
        peer: its name.
        commit: of the checkout.
        files: file → outcome → tests; outcomes are passed, xpassed (the peer's own parser fails),
            failed, internal (checks no calls and no content), no format, skipped and not collected.
        failed: tests that do not pass, "file::test".
        streamed: those of them whose calls differ, but where the peer's own parser streams
            modelmill's calls.
        measured_commit: of modelmill.
        date: of the run, in UTC.
    """

    peer: str
    commit: str
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    streamed: list[str] = field(default_factory=list)
    measured_commit: str = ""
    date: str = ""

    def total(self, *outcomes: str) -> int:
        """Return how many tests had one of the outcomes."""
        return sum(counts.get(name, 0) for counts in self.files.values() for name in outcomes)

    @property
    def compared(self) -> int:
        """Tests that check calls or content of a format that modelmill has."""
        return self.total("passed", "xpassed", "failed")

    def with_difference(self, *differences: Difference | None) -> int:
        """Return how many failed tests differ so; None: without an explanation."""
        return sum(_difference(test) in differences for test in self.failed)

    @property
    def same_calls(self) -> int:
        """Tests whose calls are the same."""
        return self.compared - self.with_difference(Difference.CALLS, None)

    @property
    def same_elsewhere(self) -> int:
        """The same, and tests whose calls the peer itself returns elsewhere."""
        return self.same_calls + sum(map(self._is_elsewhere, self.failed))

    def _is_elsewhere(self, test: str) -> bool:
        explanation = explain(test)
        return test in self.streamed or bool(explanation and explanation.elsewhere)


def count_outcomes(peer: str, commit: str, outcomes: Mapping[str, Mapping[str, Any]]) -> PeerCounts:
    """Count the outcomes of a run."""
    files: dict[str, Counter[str]] = {}
    failed = list[str]()
    for test, result in outcomes.items():
        outcome = result["outcome"]
        if outcome == "internal" and NO_FORMAT in result["message"]:
            outcome = "no format"
        name = short_name(test)
        files.setdefault(name.partition("::")[0], Counter())[outcome] += 1
        if outcome == "failed":
            failed.append(name)
    return PeerCounts(
        peer,
        commit,
        {name: dict(sorted(counts.items())) for name, counts in sorted(files.items())},
        sorted(failed),
    )


def answers_that_differ(
    outcomes: Mapping[str, Mapping[str, Any]],
) -> dict[str, list[AskedAnswer]]:
    """Return test → its answers, of the tests whose calls differ."""
    return {
        short_name(test): [AskedAnswer(**each) for each in result["asked"]]
        for test, result in outcomes.items()
        if result["outcome"] == "failed" and _difference(test) in (Difference.CALLS, None)
    }


def _difference(test: str) -> Difference | None:
    explanation = explain(test)
    return None if explanation is None else explanation.difference
