"""Recipes for vision encoders: 8-bit weights and activations without calibration.

Weights have a scale for each output channel, activations one for each token (a window's pixel, in
TinyViT). Here int8 covers both: an encoder computes thousands of tokens at a time, and weight-only
int8 would not be faster.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from modelmill.core.config import BuildConfig
from modelmill.quant import fp8, int8
from modelmill.quant.recipe import InputStatistics, Recipe
from modelmill.weights.base import WeightFormat, pack_as_format
from modelmill.weights.w8a8 import PER_TOKEN_SCALE_MARKER

SEGMENTATION_RECIPE_CHOICES = ("none", "int8", "fp8")


class W8A8NearestRecipe(Recipe):
    """int8: round to nearest, per-token input scales; uses weight_scales of BuildConfig."""

    weight_format = "w8a8"
    needs_hessian = False

    def __init__(self, config: BuildConfig) -> None:
        self.pack_options = {
            "per_channel": config.weight_scales == "channel",
            "input_scale": PER_TOKEN_SCALE_MARKER,
        }

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> WeightFormat:  # noqa: ARG002
        """Round the weight to the nearest values of its format."""
        return pack_as_format(self.weight_format, weight, torch.float32, **self.pack_options)


def segmentation_recipe(config: BuildConfig) -> Recipe | None:
    """Return the recipe of a build whose model reads images; None for "none".

    config: its quantization is one of ``SEGMENTATION_RECIPE_CHOICES``.
    """
    if config.quantization == "int8":
        weights_alone = config.activation_scales == "none"
        return int8.Int8Recipe(config) if weights_alone else W8A8NearestRecipe(config)
    return (
        fp8.Fp8Recipe(replace(config, method="nearest")) if config.quantization == "fp8" else None
    )


def describe_segmentation_recipe(config: BuildConfig) -> str:
    """Describe a recipe's effect on an encoder, for the plan."""
    inputs = "as they are" if config.activation_scales == "none" else "too, scaled by token"
    return (
        f"{config.quantization}: weights of the encoder's linear layers in 8 bits, activations "
        f"{inputs}"
    )
