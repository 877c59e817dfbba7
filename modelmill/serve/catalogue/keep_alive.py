"""How long an unused model stays loaded, written as Ollama writes it."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import Field

from modelmill.core.errors import RequestError
from modelmill.core.quoting import quote

_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
KeepAliveInput = str | int | float
KeepAliveField = Annotated[
    KeepAliveInput | None,
    Field(description="how long the model stays loaded when nothing uses it, as in Ollama"),
]


def parse_keep_alive(value: KeepAliveInput) -> float:
    """Return the seconds that an unused model stays loaded; infinite: until memory is needed.

    Args:
        value: seconds as a number or a string of one, or parts with units as "5m" or "1h30m". Zero:
            unload at once; negative: keep.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(value, bool):
        raise _invalid_keep_alive(value)
    if isinstance(value, str):
        seconds = _parse_duration_or_none(value.strip())
    else:
        seconds = float(value) if abs(value) < 1e300 else math.inf
    if seconds is None or math.isnan(seconds):
        raise _invalid_keep_alive(value)
    return math.inf if seconds < 0 else seconds


def _parse_duration_or_none(text: str) -> float | None:
    """The seconds of a duration; None if it is none."""
    if len(text) > 64:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    sign = -1.0 if text.startswith("-") else 1.0
    body = text.removeprefix("-") if sign < 0 else text.removeprefix("+")
    parts = _DURATION_PART.findall(body)
    if not parts or "".join(number + unit for number, unit in parts) != body:
        return None
    return sign * sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)


def _invalid_keep_alive(value: object) -> RequestError:
    return RequestError(
        f'keep_alive must be seconds or a duration as "5m" (0: unload at once, negative: keep), '
        f"not {quote(value, 60)}"
    )
