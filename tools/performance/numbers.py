"""Numbers as the page's tables and plots print them."""

from __future__ import annotations


def number(value: float) -> str:
    """Three digits that count; whole from 1,000 on."""
    if value >= 1000:
        return f"{value:,.0f}"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"
