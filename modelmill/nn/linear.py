"""A linear layer that delegates to the weight it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from modelmill.nn.step import Step
from modelmill.ops.eight_bit import Quantized, Wanted
from modelmill.parallel.shard import Part
from modelmill.weights.held import HeldWeight, wanted


class Linear(nn.Module):
    """y = x Wᵀ + b. Which form W has is the held weight's business; it is put in place by the loader.

    shape: (N, K) of what this rank holds. bias: [N] or None. part: which part that is; None: everything.
    """

    held: HeldWeight
    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.shape = (out_features, in_features)
        self.part: Part | None = None
        self.register_buffer("bias", torch.empty(out_features, device="meta") if bias else None)

    def take(self, part: Part) -> None:
        """Hold only a part; before the weight is put in place."""
        assert part.whole == self.shape, "a part of another matrix"
        self.part, self.shape = part, part.shape
        if self.bias is not None:
            self.bias = torch.empty(part.shape[0], device="meta") if part.bias else None

    def forward(self, x: torch.Tensor | Quantized, step: Step) -> torch.Tensor:
        """[T, K] → [T, N]."""
        return self.held.matmul(x, self.bias, step.ops)

    def wanted(self, step: Step) -> Wanted | None:
        """The 8-bit input that a norm in front should make at once; None: floating point, from which it is made here.

        Somebody who watches modules sees floating point.
        """
        fused = step.whole and step.mesh.size == 1 and step.ops.norms_quantize
        return wanted(self.held) if fused else None

    def gated(self, x: torch.Tensor | Quantized, step: Step) -> torch.Tensor | None:
        """silu(first half) · second half of the output in one op, [T, N / 2]; None where there is no such op."""
        return self.held.gated(x, self.bias, step.ops)

    def added(self, x: torch.Tensor | Quantized, residual: torch.Tensor | None, step: Step) -> bool:
        """Whether x Wᵀ + b was added to the residual [T, N], in its place, in one op; else nothing was done.

        Not where somebody watches modules, nor where other ranks have summands of it.
        """
        fused = getattr(self.held, "added", None)
        if fused is None or residual is None or not step.whole or step.mesh.size > 1:
            return False
        return fused(x, self.bias, residual, step.ops) is not None

    def rotated(self, x: torch.Tensor | Quantized, where: tuple[Any, ...], step: Step) -> torch.Tensor | None:
        """Queries of x Wᵀ + b, rotated, and keys and values stored, in one op; None: nothing was done.

        Not where somebody watches modules. where: what ``rope_cache`` takes behind the projection.
        """
        fused = getattr(self.held, "rotated", None)
        return None if fused is None or not step.whole else fused(x, self.bias, where, step.ops)

    def of_gate(self, gate_up: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Of silu(first half) · second half of [T, 2·K], where one op gates and rounds; None where there is none."""
        fused = getattr(self.held, "matmul_gated", None)
        return None if fused is None else fused(gate_up, self.bias, step.ops)
