"""The search for launch configs, with a fake clock and device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from modelmill.builder.autotune_search import (
    MIN_GEMM_GAIN,
    MIN_STEP_GAIN,
    TunableGemm,
    is_clearly_faster,
    search_launch_configs,
)
from modelmill.ops.launch_configs import TunedConfigsByOp

BF16 = torch.bfloat16
DOWN = TunableGemm("linear", (1, 4096, 11008, BF16), 0.25, ((1,), (2,), (3,)))
GATE = TunableGemm("linear_swiglu", (1, 22016, 4096, BF16), 0.5, ((2,), (4,)))


class Machine:
    """Steps of 1 s, less what the sizes give; races are recorded, and each takes a second of the
    clock.
    """

    def __init__(self, gains: dict[tuple[str, tuple[int, ...]], float], noise: float = 0.0) -> None:
        self.gains, self.noise, self.raced = gains, noise, 0
        self.random = random.Random(0)

    def seconds(self, choices: TunedConfigsByOp) -> float | None:
        gain = 0.0
        for op, chosen in choices.items():
            for sizes in chosen.values():
                each = self.gains.get((op, sizes), 0.0)
                if each is None:
                    return None
                gain += each
        return 1.0 - gain + self.random.uniform(-self.noise, self.noise)

    def race(self, options: Sequence[TunedConfigsByOp]) -> list[float | None]:
        self.raced += 1
        return [self.seconds(each) for each in options]

    def now(self) -> float:
        return float(self.raced)


def search(gains: dict[Any, Any], deadline: float = 1e9, noise: float = 0.0) -> Any:
    machine = Machine(gains, noise)
    return search_launch_configs([DOWN, GATE], machine.race, machine.now, deadline)


def test_each_product_keeps_what_is_fastest() -> None:
    outcome = search({("linear", (2,)): 0.02, ("linear", (3,)): 0.05, ("linear_swiglu", (4,)): 0.1})
    assert outcome.choices == {"linear_swiglu": {GATE.key: (4,)}, "linear": {DOWN.key: (3,)}}
    assert outcome.tuned_seconds == pytest.approx(0.85)
    assert (outcome.default_seconds, outcome.num_untried) == (1.0, 0)


def test_a_small_gain_keeps_the_default() -> None:
    """1 % of the product's time is no reason to leave a default."""
    assert (
        search(
            {
                ("linear", (3,)): 0.01 * DOWN.time_share,
                ("linear_swiglu", (4,)): 0.01 * GATE.time_share,
            }
        ).choices
        == {}
    )


def test_noise_chooses_nothing() -> None:
    assert search({}, noise=MIN_STEP_GAIN / 3).choices == {}


def test_sizes_that_cannot_run_are_no_candidates() -> None:
    outcome = search({("linear", (1,)): None, ("linear", (2,)): 0.03, ("linear", (3,)): None})
    assert outcome.choices == {"linear": {DOWN.key: (2,)}}


def test_what_is_worse_together_is_dropped() -> None:
    """Winners that lose against the defaults at the end are not kept."""

    class Moody(Machine):
        def seconds(self, choices: TunedConfigsByOp) -> float | None:
            return 2.0 if len(choices) == 2 and self.raced > 4 else super().seconds(choices)

    machine = Moody({("linear", (3,)): 0.05, ("linear_swiglu", (4,)): 0.1})
    outcome = search_launch_configs([DOWN, GATE], machine.race, machine.now, 1e9)
    assert outcome.choices == {}
    assert outcome.tuned_seconds == outcome.default_seconds == 1.0


def test_a_winner_must_win_twice() -> None:
    class Lucky(Machine):
        def seconds(self, choices: TunedConfigsByOp) -> float | None:
            lucky = self.raced == 1 and choices.get("linear_swiglu", {}).get(GATE.key) == (4,)
            return 0.5 if lucky else 1.0

    machine = Lucky({})
    assert search_launch_configs([DOWN, GATE], machine.race, machine.now, 1e9).choices == {}


def test_time_ends_the_search_with_the_largest_products_done() -> None:
    outcome = search({("linear", (3,)): 0.05, ("linear_swiglu", (4,)): 0.1}, deadline=1.0)
    assert outcome.choices == {"linear_swiglu": {GATE.key: (4,)}}
    assert outcome.num_untried == 1


def test_clearly_knows_the_product_and_the_clock() -> None:
    share = 0.5
    assert is_clearly_faster(1.0, 1.0 - 1.01 * MIN_GEMM_GAIN * share, share)
    assert not is_clearly_faster(1.0, 1.0 - 0.99 * MIN_GEMM_GAIN * share, share)
    assert not is_clearly_faster(1.0, 1.0 - 0.9 * MIN_STEP_GAIN, 0.01)
