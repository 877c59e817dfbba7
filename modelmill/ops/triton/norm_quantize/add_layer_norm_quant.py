"""Residual add and LayerNorm with an 8-bit output."""

from __future__ import annotations

import torch

from modelmill.ops.add_layer_norm_quant import AddLayerNormQuantInputs
from modelmill.ops.triton.common.device import available as available
from modelmill.ops.triton.norm_quantize.layer_norm_quant import layer_norm_quant, supports_rows


def supports(inputs: AddLayerNormQuantInputs) -> bool:
    """As ``layer_norm_quant.supports_rows``; x and residual have one shape and dtype."""
    x, residual = inputs.x, inputs.residual
    alike = x.dtype == residual.dtype and x.shape == residual.shape
    return alike and supports_rows(x, inputs.dtype, inputs.inv_scale)


def run(
    inputs: AddLayerNormQuantInputs,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Compute the op with the Triton kernel; same contract as the reference."""
    return layer_norm_quant(*inputs)
