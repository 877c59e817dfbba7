"""Parameters of tests on the emulator: slow cases, planted mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def slow_cases(*cases: object) -> list[Any]:
    """Cases of a parametrized test that are slow: a plain tuple has a value for each parameter."""
    values = (case if type(case) is tuple else (case,) for case in cases)
    return [pytest.param(*each, marks=pytest.mark.slow) for each in values]


def mistakes(changes: Mapping[str, str | tuple[str, str]]) -> list[Any]:
    """Parameters of a test of planted mistakes, by name; all but the first are slow tests.

    A mistake is a text of the sources and what stands in its place, or a text that is left out.
    """
    return [
        pytest.param(
            (change, "") if isinstance(change, str) else change,
            id=name,
            marks=[pytest.mark.slow] if number else [],
        )
        for number, (name, change) in enumerate(changes.items())
    ]
