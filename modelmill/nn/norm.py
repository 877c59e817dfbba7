"""Normalisations. RMSNorm carries the residual stream: it adds, normalises, and returns both.

What they add to the residual is a branch's output, of which each rank holds a summand: they are
where ranks meet.
"""

from __future__ import annotations

import torch
from torch import nn

from modelmill.nn.step import Step
from modelmill.ops.quant_types import ActQuantSpec, QuantizedInput


class RMSNorm(nn.Module):
    """(x, residual) → (normed, new residual); residual None starts the stream."""

    weight: torch.Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(width, device="meta"))

    def forward(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        step: Step,
        act_quant: ActQuantSpec | None = None,
    ) -> tuple[torch.Tensor | QuantizedInput, torch.Tensor]:
        """x, residual: [T, H]; x None: it was added to the residual before. act_quant: the 8-bit
        form in which the normed values are put out; None: as they are."""
        if x is None:
            x, residual = residual, None
        assert x is not None, "a branch or a residual"
        if act_quant is not None:
            return self._forward_quantized(x, residual, step, act_quant)
        if residual is None:
            return step.ops.rms_norm(x, self.weight, self.eps), x
        plain = step.ops.add_rms_norm
        return step.tp_group.all_reduce_add_rms_norm(
            plain, x, residual, self.weight, self.eps, decode=step.max_query == 1
        )

    def _forward_quantized(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, act_quant: ActQuantSpec
    ) -> tuple[QuantizedInput, torch.Tensor]:
        if residual is None:
            return QuantizedInput(
                *step.ops.rms_norm_quant(x, self.weight, self.eps, *act_quant), x.dtype
            ), x
        values, scale, total = step.ops.add_rms_norm_quant(
            x, residual, self.weight, self.eps, *act_quant
        )
        return QuantizedInput(values, scale, x.dtype), total


class LayerNorm(nn.Module):
    """(x, residual) → (normed, new residual), with mean and bias."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(width, device="meta"))
        self.register_buffer("bias", torch.empty(width, device="meta"))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [T, H]."""
        total = (
            x
            if residual is None
            else step.tp_group.all_reduce(x, decode=step.max_query == 1) + residual
        )
        return step.ops.layer_norm(total, self.weight, self.bias, self.eps), total


class QKNorm(nn.Module):
    """The weight of a norm over one head (Qwen3's q and k); applied inside the rope_cache op."""

    weight: torch.Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(dim, device="meta"))
