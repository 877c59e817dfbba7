"""Factors of queries that grow with the position."""

from __future__ import annotations

import math

import pytest
import torch

from modelmill.nn.attention_temperature import AttentionTemperature


def test_the_factor_is_one_up_to_the_trained_length_and_grows_by_steps() -> None:
    positions = torch.tensor([0, 15, 16, 31, 32, 160])
    factors = AttentionTemperature(0.5, 16).factors(positions, torch.float32)
    expected = [1 + 0.5 * math.log(1 + each) for each in (0, 0, 1, 1, 2, 10)]
    torch.testing.assert_close(factors, torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_are_rounded_to_the_activations_dtype(dtype: torch.dtype) -> None:
    growth, positions = AttentionTemperature(0.1, 16), torch.arange(200)
    rounded = growth.factors(positions, dtype)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, growth.factors(positions, torch.float32).to(dtype).float())
    assert not torch.equal(rounded, growth.factors(positions, torch.float32))


def test_without_a_slope_nothing_grows() -> None:
    factors = AttentionTemperature(0.0, 16).factors(torch.arange(100), torch.float32)
    assert torch.equal(factors, torch.ones(100))
