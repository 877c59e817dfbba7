"""Byte counts as people write and read them."""

from __future__ import annotations

import pytest

from modelmill.core.byte_size import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8000000000", 8_000_000_000),
        ("8GB", 8_000_000_000),
        ("8g", 8_000_000_000),
        ("8e9", 8_000_000_000),
        ("8GiB", 8 << 30),
        (" 1.5 MiB ", 3 << 19),
        ("512 KiB", 1 << 19),
        ("7kb", 7000),
        ("2Ti", 2 << 40),
        ("12 bytes", 12),
        ("0", 0),
        ("-3", -3),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 XB", "1.5", "8GiBs", "0x10", "nan", "1e999", "8 G B"]
)
def test_what_is_no_size(text: str) -> None:
    assert parse_bytes(text) is None


@pytest.mark.parametrize("count", [5, 3 << 10, 1 << 20, 5 << 30])
def test_what_is_shown_can_be_typed(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count
