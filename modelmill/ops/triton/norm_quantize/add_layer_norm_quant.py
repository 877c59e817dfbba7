"""Residual add and LayerNorm with an 8-bit output."""

from __future__ import annotations

import torch

from modelmill.ops.add_layer_norm_quant import AddLayerNormQuantInputs
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.norm_quantize.layer_norm_quant import (
    SUPPORTED_PROBLEMS as SUPPORTED_PROBLEMS,
)
from modelmill.ops.triton.norm_quantize.layer_norm_quant import layer_norm_quant


def run(
    inputs: AddLayerNormQuantInputs,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Compute the op with the Triton kernel; same contract as the reference."""
    return layer_norm_quant(*inputs)
