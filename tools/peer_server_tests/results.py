"""What a run found, as docs/llama_cpp_tests.md shows it, and the file that keeps it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.peer_server_tests.reasons import find_reason

FILE = Path("tools/peer_server_tests/results.json")
PASSED, FAILED, NOT_APPLICABLE = "passed", "failed", "not applicable"


@dataclass
class Results:
    """Counts of a run.

    Attributes:
        commit: of llama.cpp, and its date or release.
        files: number of tests by outcome, by file.
        reasons: number of failed tests by the reason's text.
        features: number of tests that are not applicable by what they need.
        unexplained: failed tests without a reason.
        measured_commit: of modelmill.
        date: of the run, in UTC.
    """

    commit: str
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    features: dict[str, int] = field(default_factory=dict)
    unexplained: list[str] = field(default_factory=list)
    measured_commit: str = ""
    date: str = ""

    def total(self, outcome: str) -> int:
        """The number of tests with an outcome."""
        return sum(counts.get(outcome, 0) for counts in self.files.values())


def count(commit: str, outcomes: Mapping[str, Mapping[str, str]]) -> Results:
    """Count the outcomes of a run.

    Args:
        commit: of llama.cpp.
        outcomes: by test, as ``run_tests`` returns them.
    """
    files: dict[str, Counter[str]] = {}
    reasons, features = Counter[str](), Counter[str]()
    results = Results(commit)
    for test, outcome in outcomes.items():
        name = test.partition("::")[0].removeprefix("unit/")
        files.setdefault(name, Counter())[outcome["outcome"]] += 1
        if outcome["outcome"] == NOT_APPLICABLE:
            features[outcome["message"]] += 1
        if outcome["outcome"] in (FAILED, "not collected"):
            reason = find_reason(test, outcome)
            if reason is None:
                results.unexplained.append(test)
            else:
                reasons[reason.text] += 1
    results.files = {name: dict(sorted(counts.items())) for name, counts in sorted(files.items())}
    results.reasons, results.features = dict(reasons), dict(features.most_common())
    return results


def load(root: Path) -> Results:
    """The saved results, below the repository."""
    return Results(**json.loads((root / FILE).read_text("utf-8")))


def save(root: Path, results: Results) -> None:
    """Save results, below the repository."""
    (root / FILE).write_text(json.dumps(asdict(results), indent=1) + "\n", "utf-8")
