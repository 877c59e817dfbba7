"""fp8 (e4m3) weights, rounded to nearest; activations in fp8 by token or with one static scale, or as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from modelmill.core.config import BuildConfig
from modelmill.quant.block import Block
from modelmill.quant.recipe import Prepared, Statistics
from modelmill.quant.smoothquant import static
from modelmill.weights.fp8 import Held
from modelmill.weights.w8a8 import AS_THEY_ARE, BY_TOKEN


class Recipe:
    """Options of BuildConfig: activation_scales, weight_scales."""

    kind = "fp8"
    prepares = moments = False

    def __init__(self, config: BuildConfig) -> None:
        self.calibrated = config.activation_scales == "tensor"
        given = AS_THEY_ARE if config.activation_scales == "none" else BY_TOKEN
        self.layout: Mapping[str, Any] = {"per_channel": config.weight_scales == "channel", "input_scale": given}

    def prepare(self, block: Block, statistics: Mapping[str, Statistics], dtype: torch.dtype) -> Prepared:  # noqa: ARG002
        """Nothing."""
        return Prepared()

    def hold(self, weight: torch.Tensor, statistics: Statistics | None) -> Held:
        """Rounded to nearest; a static scale is what errs least on the outputs."""
        held = Held.pack(weight, torch.float32, **self.layout)
        return static(weight, held, statistics) if statistics is not None else held
