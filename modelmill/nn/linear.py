"""A linear layer that delegates to the weight it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from modelmill.nn.step import Step
from modelmill.ops.quant_types import ActQuantSpec, QuantizedInput
from modelmill.parallel.shard import Shard
from modelmill.weights.base import WeightFormat, act_quant


class Linear(nn.Module):
    """y = x Wᵀ + b. Which format W has is the weight's business; it is put in place by the loader.

    shape: (N, K) of what this rank holds. bias: [N] or None. weight_shard: which part that is;
    None: everything.
    """

    weight: WeightFormat
    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.shape = (out_features, in_features)
        self.weight_shard: Shard | None = None
        self.register_buffer("bias", torch.empty(out_features, device="meta") if bias else None)

    def take_shard(self, shard: Shard) -> None:
        """Hold only a part; before the weight is put in place."""
        assert shard.full_shape == self.shape, "a part of another matrix"
        self.weight_shard, self.shape = shard, shard.shape
        if self.bias is not None:
            self.bias = torch.empty(shard.shape[0], device="meta") if shard.has_bias else None

    def forward(self, x: torch.Tensor | QuantizedInput, step: Step) -> torch.Tensor:
        """[T, K] → [T, N]."""
        return self.weight.matmul(x, self.bias, step.ops)

    def act_quant(self, step: Step) -> ActQuantSpec | None:
        """The 8-bit input that a norm in front should make at once; None: floating point, from
        which it is made here.

        Somebody who watches modules sees floating point.
        """
        fused = step.fuse and step.tp_group.size == 1 and step.ops.fuses_norm_quant
        return act_quant(self.weight) if fused else None

    def try_linear_swiglu(
        self, x: torch.Tensor | QuantizedInput, step: Step
    ) -> torch.Tensor | None:
        """silu(first half) · second half of the output in one op, [T, N / 2]; None where there is
        no such op.
        """
        return self.weight.try_linear_swiglu(x, self.bias, step.ops)

    def try_linear_add(
        self, x: torch.Tensor | QuantizedInput, residual: torch.Tensor | None, step: Step
    ) -> bool:
        """Whether x Wᵀ + b was added to the residual [T, N], in its place, in one op; else nothing
        was done.

        Not where somebody watches modules, nor where other ranks have summands of it.
        """
        fused = getattr(self.weight, "try_linear_add", None)
        if fused is None or residual is None or not step.fuse or step.tp_group.size > 1:
            return False
        return fused(x, self.bias, residual, step.ops) is not None

    def try_qkv_rope(
        self, x: torch.Tensor | QuantizedInput, rope_args: tuple[Any, ...], step: Step
    ) -> torch.Tensor | None:
        """Queries of x Wᵀ + b, rotated, and keys and values stored, in one op; None: nothing was
        done.

        Not where somebody watches modules. rope_args: what ``rope_cache`` takes behind the
        projection.
        """
        fused = getattr(self.weight, "try_qkv_rope", None)
        return None if fused is None or not step.fuse else fused(x, self.bias, rope_args, step.ops)

    def try_swiglu_quant(self, gate_up: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Of silu(first half) · second half of [T, 2·K], where one op gates and rounds; None where
        there is none.
        """
        fused = getattr(self.weight, "try_swiglu_quant", None)
        return None if fused is None else fused(gate_up, self.bias, step.ops)
