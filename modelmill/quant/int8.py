"""Weight-only int8: symmetric, one scale per output channel, round to nearest."""

from __future__ import annotations

import torch

from modelmill.core.config import BuildConfig
from modelmill.core.recipe_declaration import (
    FormatTolerances,
    ImageTolerances,
    RecipeDeclaration,
    TotalErrorTolerances,
)
from modelmill.quant.recipe import InputStatistics, Recipe
from modelmill.weights.base import WeightFormat, pack_as_format

# Read from the source, without importing this file: literals only (core/recipe_declaration.py).
DECLARATION = RecipeDeclaration(
    position=1,
    weight_format="int8",
    docs=(
        "8 / 16 bits, a scale a row",
        "you want half the size and no doubt about the answers; no calibration",
    ),
    tolerances=FormatTolerances(
        weight=(0.1, 0.3, 1.6e-2),
        block=(0.4, 0.3, 0.05),
        whole=TotalErrorTolerances(linear=(1e-1, 3e-1), gain=1.6e-2, logits=3.5e-2),
        images=ImageTolerances(embedding=1e-1, mask_logits=2e-1),
    ),
)


class Int8Recipe(Recipe):
    """int8 with round to nearest, each weight independently."""

    weight_format = "int8"

    def __init__(self, config: BuildConfig) -> None:
        """It has no options."""

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> WeightFormat:  # noqa: ARG002
        """Round the weight to the nearest int8 values, one scale per row."""
        return pack_as_format("int8", weight, torch.float32)


RECIPE = Int8Recipe
