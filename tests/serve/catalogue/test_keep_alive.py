"""Durations as Ollama's clients write them."""

from __future__ import annotations

import math

import pytest

from modelmill.core.errors import RequestError
from modelmill.serve.catalogue.keep_alive import KeepAliveInput, parse_keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (300, 300.0), (0, 0.0), (1.5, 1.5), ("5m", 300.0), ("1h30m", 5400.0), ("1.5h", 5400.0),
        ("300ms", 0.3), ("0", 0.0), ("0s", 0.0), ("42", 42.0), (-1, math.inf), ("-1", math.inf),
        ("-1m", math.inf), (10**400, math.inf), ("+2s", 2.0),
    ],
)  # fmt: skip
def test_durations(value: KeepAliveInput, seconds: float) -> None:
    assert parse_keep_alive(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "5 m", "5x", "m", "--1", "1h-2m", "nan", True, "9" * 65])
def test_others_are_refused(value: KeepAliveInput) -> None:
    with pytest.raises(RequestError, match=r"^keep_alive must be seconds or a duration"):
        parse_keep_alive(value)
