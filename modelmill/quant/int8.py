"""Weight-only int8: symmetric, one scale per output channel, round to nearest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from modelmill.core.config import BuildConfig
from modelmill.quant.calibration_state import QuantizableLayer
from modelmill.quant.recipe import InputStatistics, PrepareResult
from modelmill.weights.base import WeightFormat, pack


class Int8Recipe:
    """int8 with round to nearest, each weight independently."""

    weight_format = "int8"
    needs_calibration = needs_prepare = False

    def __init__(self, config: BuildConfig) -> None:  # noqa: ARG002  it has no options
        self.pack_options: Mapping[str, Any] = {}

    def prepare(
        self,
        block: QuantizableLayer,  # noqa: ARG002
        statistics: Mapping[str, InputStatistics],  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> PrepareResult:
        """Nothing."""
        return PrepareResult()

    def quantize(self, weight: torch.Tensor, statistics: InputStatistics | None) -> WeightFormat:  # noqa: ARG002
        """Rounded to nearest."""
        return pack("int8", weight, torch.float32)


RECIPE = Int8Recipe
