"""The rules that make one figure of the seconds of a side."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figure_statistics import (
    LONG,
    SHORT,
    MeasuredFigure,
    speedup,
    time_per_token,
    whole_call_figure,
)

SECONDS = st.floats(1e-4, 1e3)


def test_time_per_token_is_what_the_steps_between_the_calls_took() -> None:
    first, step = 0.25, 0.004
    figure = time_per_token([first + SHORT * step] * 3, [first + LONG * step] * 3)
    assert figure.value == pytest.approx(4.0)
    assert (figure.min, figure.max, figure.runs) == (pytest.approx(4.0), pytest.approx(4.0), 3)


def test_time_per_token_takes_medians_of_the_calls() -> None:
    short, long = [0.1, 0.1, 5.0], [0.612, 0.612, 0.612]
    assert time_per_token(short, long).value == pytest.approx((0.612 - 0.1) / (LONG - SHORT) * 1e3)
    assert time_per_token(short, long).min < 0, "the odd round shows in the spread"


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=9))
def test_a_figure_lies_within_its_spread(rounds: list[tuple[float, float]]) -> None:
    figure = time_per_token([a for a, _ in rounds], [b for _, b in rounds])
    assert figure.min <= figure.value <= figure.max
    assert figure.runs == len(rounds)


@given(st.lists(SECONDS, min_size=1, max_size=9), st.sampled_from((1.0, 1e3)))
def test_whole_calls_give_their_median(seconds: list[float], scale: float) -> None:
    figure = whole_call_figure(seconds, scale)
    assert figure.value == pytest.approx(statistics.median(seconds) * scale)
    assert figure.min == min(seconds) * scale
    assert figure.max == max(seconds) * scale


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="one of each"):
        time_per_token([1.0, 1.0], [2.0])
    with pytest.raises(ValueError, match="one of each"):
        time_per_token([], [])
    with pytest.raises(ValueError, match="no call"):
        whole_call_figure([])


def test_a_ratio_above_one_says_that_ours_is_faster() -> None:
    assert speedup(MeasuredFigure(8.0, 8, 8, 1), MeasuredFigure(4.0, 4, 4, 1)) == 2.0
