"""A misspelt keyword of the Python API is named, with the nearest one."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import UnknownOption
from modelmill.core.types import SamplingParams
from modelmill.core.unknown_keywords import refuse_unknown_keywords


@pytest.mark.parametrize(
    ("cls", "wrong", "right"),
    [
        (SamplingParams, "max_token", "max_tokens"),
        (BuildConfig, "quantisation", "quantization"),
        (RunConfig, "max_model_length", "max_model_len"),
    ],
)
def test_a_misspelt_field_is_named_with_the_nearest_one(cls: Any, wrong: str, right: str) -> None:
    message = rf"^{cls.__name__}: unknown option {wrong}; did you mean {right}\?$"
    with pytest.raises(UnknownOption, match=message):
        cls(**{wrong: 5})
    assert list(inspect.signature(cls).parameters) == [each.name for each in fields(cls)]


def test_a_better_error_comes_first() -> None:
    def point_elsewhere(names: Any) -> None:
        if "colour" in names:
            raise ValueError("the colour belongs to the frame")

    class Picture:
        @refuse_unknown_keywords("draw", point_elsewhere)
        def draw(self, *, width: int = 3) -> int:
            """Draw."""
            return width

    assert Picture().draw(width=5) == 5
    with pytest.raises(ValueError, match="belongs to the frame"):
        Picture().draw(colour=1)  # type: ignore[call-arg]
    with pytest.raises(UnknownOption, match=r"draw: unknown option widht; did you mean width\?"):
        Picture().draw(widht=1)  # type: ignore[call-arg]
