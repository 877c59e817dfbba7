"""Weight-only int8: symmetric, one scale per output channel, round to nearest; nothing to calibrate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from modelmill.core.config import BuildConfig
from modelmill.quant.block import Block
from modelmill.quant.recipe import Prepared, Statistics
from modelmill.weights.held import HeldWeight, pack


class Recipe:
    """Each weight for itself."""

    kind = "int8"
    calibrated = prepares = False

    def __init__(self, config: BuildConfig) -> None:  # noqa: ARG002  it has no options
        self.layout: Mapping[str, Any] = {}

    def prepare(self, block: Block, statistics: Mapping[str, Statistics], dtype: torch.dtype) -> Prepared:  # noqa: ARG002
        """Nothing."""
        return Prepared()

    def hold(self, weight: torch.Tensor, statistics: Statistics | None) -> HeldWeight:  # noqa: ARG002
        """Rounded to nearest."""
        return pack("int8", weight, torch.float32)
