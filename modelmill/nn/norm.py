"""Norms: each adds a branch to the residual stream, normalises the sum and returns both.

With tensor parallelism every rank has a partial sum of the branch: the norm is where it is
all-reduced.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from modelmill.nn.step import Step
from modelmill.ops.binding import OpBinding


class RMSNorm(nn.Module):
    """(x, residual) → (normed, new residual); residual None starts the stream."""

    weight: torch.Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self._norm, self._add_norm = OpBinding(), OpBinding()
        self.register_buffer("weight", torch.empty(width, device="meta"))

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        step: Step,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [T, H]."""
        if residual is None:
            return self._norm(step.ops.rms_norm, x, self.weight, self.eps), x
        return step.tp_group.all_reduce_add_rms_norm(
            partial(self._add_norm, step.ops.add_rms_norm),
            x,
            residual,
            self.weight,
            self.eps,
            decode=step.max_query == 1,
        )


class AffineNorm(nn.Module):
    """The weights of a norm with mean and bias; a subclass says how it runs."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self._norm, self._add_norm = OpBinding(), OpBinding()
        self.register_buffer("weight", torch.empty(width, device="meta"))
        self.register_buffer("bias", torch.empty(width, device="meta"))


class LayerNorm(AffineNorm):
    """(x, residual) → (normed, new residual), with mean and bias."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [T, H]."""
        total = (
            x
            if residual is None
            else step.tp_group.all_reduce(x, decode=step.max_query == 1) + residual
        )
        return self._norm(step.ops.layer_norm, total, self.weight, self.bias, self.eps), total


class QKNormWeight(nn.Module):
    """The weight of a norm over one head (Qwen3's q and k); applied inside the rope_cache op."""

    weight: torch.Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(dim, device="meta"))
