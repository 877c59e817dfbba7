"""The measuring rods: exact on constructed cases, and never fooled by zeros, NaN or Inf."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.accept import error_metrics
from modelmill.accept.error_metrics import (
    center_logits,
    compare_logits,
    compare_tensors,
    confident_top1_agreement,
    kl_divergence_per_row,
    perplexity,
)


def test_known_numbers() -> None:
    row = compare_tensors("x", torch.tensor([3.0, 5.0, 0.0]), torch.tensor([3.0, 4.0, 0.0]))
    assert (row.max_abs, row.median_abs, row.scale, row.max_rel) == (1.0, 0.0, 4.0, 0.25)
    assert row.mean_abs == pytest.approx(1 / 3)
    assert row.rel_l2 == pytest.approx(1 / 5)
    assert row.gain == pytest.approx(29 / 25)
    assert row.cosine == pytest.approx(29 / (5 * math.sqrt(34)))


@settings(deadline=None, max_examples=60)
@given(
    factor=st.floats(0.1, 10),
    size=st.integers(1, 40),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
def test_a_factor_is_the_gain(factor: float, size: int, exponent: int, seed: int) -> None:
    x = (
        torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * 10.0**exponent
    )
    row = compare_tensors("x", factor * x, x)
    assert row.gain == pytest.approx(factor)
    assert row.rel_l2 == pytest.approx(abs(factor - 1), abs=1e-12)
    assert row.max_rel == pytest.approx(abs(factor - 1), abs=1e-12)
    assert row.cosine == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinitely_wrong(bad: float) -> None:
    fine, broken = torch.ones(3), torch.tensor([1.0, bad, 1.0])
    for actual, reference in ((broken, fine), (fine, broken), (broken, broken)):
        row = compare_tensors("x", actual, reference)
        assert (
            row.max_abs == row.mean_abs == row.median_abs == row.max_rel == row.rel_l2 == math.inf
        )
        assert (row.gain, row.cosine, row.is_finite) == (math.inf, 0.0, False)
    logits = torch.zeros(2, 5)
    logits[0, 2] = 9.0
    broken = logits.clone()
    broken[0, 1] = bad
    assert confident_top1_agreement(broken, logits, 0.1).first_mismatch == 0
    assert not math.isfinite(float(kl_divergence_per_row(broken.fill_(math.nan), logits)[0]))
    assert perplexity(broken, torch.tensor([1, 1])) == math.inf


def test_zeros_and_shapes() -> None:
    zero, one = torch.zeros(4), torch.ones(4)
    row = compare_tensors("x", zero, zero)
    assert (row.max_abs, row.rel_l2, row.gain, row.cosine) == (0.0, 0.0, 1.0, 1.0)
    assert compare_tensors("x", one, zero).rel_l2 == math.inf
    assert compare_tensors("x", zero, one).gain == 0.0
    assert compare_tensors("x", torch.ones(2, 2), one).max_abs == math.inf
    assert compare_tensors("x", torch.ones(0), torch.ones(0)).max_abs == 0.0


def test_logits_measures() -> None:
    reference = torch.tensor([[4.0, 1.0, 0.0, 0.0], [1.01, 1.0, 0.0, 0.0]]).double()
    assert compare_logits("l", reference + 7, reference).rel_l2 < 1e-12
    swapped = reference[:, [1, 0, 2, 3]]
    result = confident_top1_agreement(swapped, reference, margin=0.1)
    assert (result.num_rows, result.num_sure, result.num_agreed, result.first_mismatch) == (
        2,
        1,
        0,
        0,
    )
    assert confident_top1_agreement(reference, reference, margin=0.0).all_agree
    assert float(kl_divergence_per_row(reference + 3, reference).max()) < 1e-12
    assert float(kl_divergence_per_row(swapped, reference)[0]) > 1
    assert perplexity(torch.zeros(3, 8), torch.tensor([0, 5, 7])) == pytest.approx(8)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 9),
    vocab=st.integers(2, 30),
    block=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_blocks_of_rows_change_nothing(rows: int, vocab: int, block: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(rows, vocab, generator=generator)
    actual = reference + 0.1 * torch.randn(rows, vocab, generator=generator)
    targets = torch.randint(0, vocab, (rows,), generator=generator)

    def all_metrics() -> list[float]:
        row, agreed = (
            compare_logits("x", actual, reference),
            confident_top1_agreement(actual, reference, 0.3),
        )
        numbers = [
            row.max_abs,
            row.mean_abs,
            row.max_rel,
            row.rel_l2,
            row.cosine,
            row.gain,
            row.scale,
        ]
        counts = [
            float(agreed.num_sure),
            float(agreed.num_agreed),
            float(-1 if agreed.first_mismatch is None else agreed.first_mismatch),
        ]
        return [
            *numbers,
            *counts,
            *kl_divergence_per_row(actual, reference).tolist(),
            perplexity(actual, targets),
        ]

    expected = all_metrics()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(error_metrics, "MAX_LOGITS_PER_BLOCK", block)
        assert all_metrics() == pytest.approx(expected, rel=1e-12)
    plain = compare_tensors("x", center_logits(actual), center_logits(reference))
    row = compare_logits("x", actual, reference)
    assert (row.rel_l2, row.gain, row.cosine) == pytest.approx(
        (plain.rel_l2, plain.gain, plain.cosine), rel=1e-12
    )
    assert row.median_abs == pytest.approx(plain.median_abs, rel=1e-6)


@pytest.mark.parametrize("worst", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 5])
def test_one_bad_logit_in_any_block_makes_the_rows_incomparable(
    worst: float, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_metrics, "MAX_LOGITS_PER_BLOCK", 8)
    expected = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    actual = expected.clone()
    actual[at, 1] = worst
    assert not compare_logits("x", actual, expected).is_finite
    assert not confident_top1_agreement(actual, expected, -1.0).all_agree
    assert math.isinf(float(kl_divergence_per_row(actual, expected)[at]))
