"""Numbers of the performance page: a loss does not look like a tie."""

from __future__ import annotations

import pytest

from tools.performance.numbers import ratio_number


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.174, "1.17"),
        (1.0, "1.00"),
        (1.001, "1.00"),
        (0.994, "0.99"),
        (0.997, "0.997"),
        (0.9996, "0.9996"),
    ],
)
def test_a_ratio_below_one_is_not_printed_as_one(ratio: float, text: str) -> None:
    assert ratio_number(ratio) == text
