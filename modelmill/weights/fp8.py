"""fp8 (e4m3) weights for fp8 inputs (per-token or static scales) or float inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from modelmill.ops.registry import Ops
from modelmill.ops.w8a8_linear import Linear8BitInputs
from modelmill.weights import w8a8
from modelmill.weights.base import UpcastSpec


@dataclass(frozen=True)
class Fp8Weight(w8a8.W8A8Weight):
    """The counterpart of ``W8A8Weight`` with weight [N, K] e4m3."""

    format: str = "fp8"

    VALUE_DTYPE: ClassVar[torch.dtype] = torch.float8_e4m3fn
    PRODUCT: ClassVar[str] = "fp8_linear"
    UNPACKS: ClassVar[UpcastSpec] = UpcastSpec("fp8_linear", torch.float32)
    UNPACKS_FLOAT_INPUT: ClassVar[UpcastSpec] = UNPACKS

    def matmul_float_input(
        self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor:
        """Multiply a float input by the weight."""
        inputs = Linear8BitInputs(x, self.weight, self.scale, None, x.dtype, bias)
        return self.run_bound_op(ops.fp8_linear, inputs)
