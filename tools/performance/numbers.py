"""Numbers as the page's tables and plots print them."""

from __future__ import annotations

from collections.abc import Collection


def number(value: float) -> str:
    """Three digits that count; whole from 1,000 on."""
    if value >= 1000:
        return f"{value:,.0f}"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def against_target(value: float, target: float | None) -> str:
    """The number, with a digit more where it would look like the target and is not."""
    text = number(value)
    looks_equal = target is not None and value != target and float(text.replace(",", "")) == target
    return f"{value:.4g}" if looks_equal else text


def ratio_number(ratio: float) -> str:
    """Two decimals, and as many more as a loss needs that would look like a tie."""
    decimals = 2
    while ratio < 1 and decimals < 6 and round(ratio, decimals) >= 1:
        decimals += 1
    return f"{ratio:.{decimals}f}"


def count_range(counts: Collection[int]) -> str:
    """The smallest and the largest of some counts, as "2 to 4"; one number if they are equal."""
    return " to ".join(map(str, dict.fromkeys((min(counts), max(counts)))))
