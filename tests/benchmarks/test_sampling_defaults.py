"""Right answers are counted by question, over all seeds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.sampling_defaults import QUESTIONS, SEEDS, SETTINGS, count_right, is_right

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_says_what_the_rows_say() -> None:
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    results = ROOT / "benchmarks/results/sampling_defaults.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    newest = {row["setting"]: row for row in rows}
    assert set(newest) == set(SETTINGS)
    for setting, row in newest.items():
        assert f"| {setting} | {row['value']} |" in page
        assert f"right answers of {row['total']}" in page
        assert row["commit"] in page


class KnowsParis:
    """Answers every question alike."""

    def chat(self, conversations: list[Any], params: list[Any], **_: Any) -> list[Any]:
        self.seeds = [each.seed for each in params]
        answer = SimpleNamespace(outputs=[SimpleNamespace(text="It is Paris.")])
        return [answer] * len(conversations)


def test_an_answer_is_right_if_it_has_a_word() -> None:
    assert is_right("It is Paris.", ("Lyon", "Paris"))
    assert not is_right("It is paris.", ("Paris",))


def test_each_question_is_asked_with_every_seed() -> None:
    llm = KnowsParis()
    right = [count_right(llm, setting) for setting in SETTINGS.values()]
    assert right == [len(SEEDS)] * len(SETTINGS)
    assert len(llm.seeds) == len(QUESTIONS) * len(SEEDS)
    assert set(llm.seeds) == set(SEEDS)
