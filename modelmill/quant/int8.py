"""Weight-only int8: symmetric, one scale per output channel, round to nearest."""

from __future__ import annotations

import torch

from modelmill.core.config import BuildConfig
from modelmill.quant.recipe import InputStatistics, Recipe
from modelmill.weights.base import WeightFormat, pack


class Int8Recipe(Recipe):
    """int8 with round to nearest, each weight independently."""

    weight_format = "int8"

    def __init__(self, config: BuildConfig) -> None:
        """It has no options."""

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> WeightFormat:  # noqa: ARG002
        """Rounded to nearest."""
        return pack("int8", weight, torch.float32)


RECIPE = Int8Recipe
