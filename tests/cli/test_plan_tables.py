"""The plan as a table."""

from __future__ import annotations

import pytest

from modelmill.cli.plan_tables import format_parameter_count


@pytest.mark.parametrize(
    ("total", "active", "text"),
    [
        (227_000, 177_000, "0.227 million, 0.177 million a token"),
        (46_700_000_000, 12_900_000_000, "46.7 billion, 12.9 billion a token"),
        (260_000, 260_000, "0.26 million"),
        (12_345, 12_000, "12.3 thousand, 12 thousand a token"),
    ],
)
def test_one_unit_for_both_counts(total: int, active: int, text: str) -> None:
    assert format_parameter_count(total, active) == text
