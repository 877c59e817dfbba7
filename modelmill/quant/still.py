"""Recipes for the encoders of models that read images: 8-bit weights and activations, nothing to calibrate.

Weights have a scale for each output channel, activations one for each token (a window's pixel, in TinyViT). Here int8
means both: an encoder computes thousands of tokens at a time, and weights alone would save nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from modelmill.core.config import BuildConfig
from modelmill.quant import fp8, int8
from modelmill.quant.block import Block
from modelmill.quant.recipe import Prepared, Recipe, Statistics
from modelmill.weights.held import HeldWeight, pack
from modelmill.weights.w8a8 import BY_TOKEN

KNOWN = ("none", "int8", "fp8")


class Rounded:
    """int8: round to nearest, activations by token. Options of BuildConfig: weight_scales."""

    kind = "w8a8"
    calibrated = prepares = moments = False

    def __init__(self, config: BuildConfig) -> None:
        self.layout: Mapping[str, Any] = {
            "per_channel": config.weight_scales == "channel",
            "input_scale": BY_TOKEN,
        }

    def prepare(self, block: Block, statistics: Mapping[str, Statistics], dtype: torch.dtype) -> Prepared:  # noqa: ARG002
        """Nothing."""
        return Prepared()

    def hold(self, weight: torch.Tensor, statistics: Statistics | None) -> HeldWeight:  # noqa: ARG002
        """Rounded to nearest."""
        return pack(self.kind, weight, torch.float32, **self.layout)


def still_recipe(config: BuildConfig) -> Recipe | None:
    """The recipe of a build whose model reads images; None for "none". config: one of ``KNOWN``, checked before."""
    if config.quantization == "int8":
        weights_alone = config.activation_scales == "none"
        return int8.Recipe(config) if weights_alone else Rounded(config)
    return fp8.Recipe(replace(config, method="nearest")) if config.quantization == "fp8" else None


def still_reason(config: BuildConfig) -> str:
    """What a recipe does to an encoder, for the plan."""
    inputs = "as they are" if config.activation_scales == "none" else "too, scaled by token"
    return f"{config.quantization}: weights of the encoder's linear layers in 8 bits, activations {inputs}"
