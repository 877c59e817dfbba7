"""Batches through the scheduler at a card's measured rates."""

from __future__ import annotations

import pytest

from benchmarks.scheduler_simulation import POLICIES, StepCost, parse_batch, simulate_seconds

NOTHING = StepCost(weights=0.0, row=0.0, token=0.0, key=0.0, attended_key_ms=0.0)


def test_a_batch_is_labelled_in_one_word() -> None:
    assert parse_batch("3x1024+144") == [(1024, 144)] * 3
    with pytest.raises(ValueError, match="invalid literal"):
        parse_batch("1024")


def test_an_answer_alone_costs_its_parts() -> None:
    """One step of a prompt, then 9 of one token each."""
    assert simulate_seconds(
        [(100, 10)], StepCost(weights=2.0, row=0.0, token=0.0, key=0.0, attended_key_ms=0.0)
    ) == pytest.approx(0.021)
    assert simulate_seconds(
        [(100, 10)], StepCost(weights=-1.0, row=1.0, token=0.0, key=0.0, attended_key_ms=0.0)
    ) == pytest.approx(0.0)
    keys = sum(range(101, 110))
    assert simulate_seconds(
        [(100, 10)], StepCost(weights=-1.0, row=1.0, token=0.0, key=1.0, attended_key_ms=0.0)
    ) == pytest.approx(keys / 1e3)
    assert simulate_seconds(
        [(100, 10)], StepCost(weights=-1.0, row=1.0, token=0.0, key=0.0, attended_key_ms=1.0)
    ) == pytest.approx(0.1)
    assert simulate_seconds([(100, 10)], NOTHING) == pytest.approx(0.001), (
        "what prompts take on top of the weights"
    )


def test_what_the_rule_is_for() -> None:
    """Equal answers that can all run: prompts first.

    Answers that differ: in pieces, the longest first.
    """
    equal = {
        name: simulate_seconds(parse_batch("64x1024+144"), StepCost(), **options)
        for name, options in POLICIES.items()
    }
    assert equal["as it is"] == equal["never in pieces"] < 0.99 * equal["always in pieces"]
    lengths = [(700, 20 + 37 * n % 400) for n in range(100)]
    other = {
        name: simulate_seconds(lengths, StepCost(), **options) for name, options in POLICIES.items()
    }
    assert other["as it is"] == other["always in pieces"] < 0.99 * other["never in pieces"]
