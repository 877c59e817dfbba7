"""The step of prompts beside answers that step.py times."""

from __future__ import annotations

import torch

from benchmarks import model_step as timed
from tests.runtime import tiny


def test_prompts_are_cut_into_pieces_and_answers_stand_behind_them() -> None:
    [sizes] = timed.parse_mixed_sizes("1100+7x40")
    made = timed.mixed_step(tiny.decoder(), sizes, "int8", {})
    assert made.query_start.diff().tolist() == [512, 512, 76, *[1] * 7]
    assert made.context_lens.tolist() == [512, 512, 76, *[40] * 7]
    assert made.kv.k[0].dtype == torch.int8
    assert timed.greedy_ids(tiny.decoder(), made).shape == (10,)


def test_several_are_separated_by_commas() -> None:
    assert list(timed.parse_mixed_sizes("768+230x1000,100+8x64")) == [
        (768, 230, 1000),
        (100, 8, 64),
    ]
