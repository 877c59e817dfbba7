"""fp8 (e4m3) weights; activations in fp8 by token or with one static scale, or floating point as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from modelmill.ops.eight_bit import Quantized
from modelmill.ops.shelf import Ops
from modelmill.weights import w8a8
from modelmill.weights.held import Expansion


@dataclass(frozen=True)
class Held(w8a8.Held):
    """As ``w8a8.Held`` with weight [N, K] e4m3."""

    kind: str = "fp8"

    VALUES: ClassVar[torch.dtype] = torch.float8_e4m3fn
    EXPANDS: ClassVar[Expansion] = Expansion("fp8_linear", torch.float32)
    EXPANDS_FLOATS: ClassVar[Expansion] = EXPANDS

    def multiplied(self, x: Quantized, x_scale: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        return ops.fp8_linear(x.values, self.weight, self.scale, x_scale, x.dtype, bias)

    def multiplied_floats(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        return ops.fp8_linear(x, self.weight, self.scale, None, x.dtype, bias)
