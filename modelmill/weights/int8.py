"""Weight-only int8: symmetric, one scale per output channel, float activations.

A scale is row maximum / 127, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.int8_linear import quantize, supports_int8pack_mm, uses_int8pack_mm
from modelmill.ops.registry import Ops
from modelmill.weights.base import (
    StoredTensorDimsAndDtypes,
    UpcastSpec,
    WeightFormat,
    pad_columns_for_amx,
    slice_tensor,
)


@dataclass(frozen=True)
class Int8Weight(WeightFormat):
    """A matrix of int8 codes with one scale per output channel.

    Attributes:
        weight: [N, K] int8 in [−127, 127], or the expanded weight.
        scale: [N] float32.
        packed: the int8 codes if weight is expanded.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    format: str = "int8"
    packed: torch.Tensor | None = None

    STORED_TENSORS: ClassVar[StoredTensorDimsAndDtypes] = {
        "weight": (2, (torch.int8,)),
        "scale": (1, (torch.float32,)),
    }
    UNPACKS: ClassVar[UpcastSpec] = UpcastSpec("int8_linear", None)

    @classmethod
    def pack(cls, weight: torch.Tensor, dtype: torch.dtype) -> Int8Weight:  # noqa: ARG003
        """Quantize a dense float matrix."""
        return Int8Weight(*quantize(weight))

    @classmethod
    def packed_tensor_specs(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,  # noqa: ARG003
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each stored tensor, by suffix."""
        return {"weight": (shape, torch.int8), "scale": ((shape[0],), torch.float32)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Int8Weight:
        """Build the weight from its stored tensors by suffix."""
        weight, scale = tensors["weight"], tensors["scale"]
        if len(scale) != len(weight):
            raise CorruptArtifact(
                f"an int8 weight has {len(weight)} rows and {len(scale)} scales; rebuild the engine"
            )
        return Int8Weight(weight, scale)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the tensor; [N, K] for a weight."""
        return self.weight.shape[0], self.weight.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by suffix."""
        return {"weight": self.weight, "scale": self.scale}

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""
        weight = self.packed if self.packed is not None and uses_int8pack_mm(x) else self.weight
        return self.run_bound_op(ops.int8_linear, x, weight, self.scale, bias)

    def try_linear_swiglu(
        self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        """Compute the product and SwiGLU's gate in one op, or return None without such an op."""
        if ops.int8_linear_swiglu is None:
            return None
        return self.run_bound_op(ops.int8_linear_swiglu, x, self.weight, self.scale, bias)

    def dequantize(self) -> torch.Tensor:
        """Return the dequantized matrix [N, K] float32."""
        return self.weight.float() * self.scale[:, None]

    def unpack(self, dtype: torch.dtype) -> Int8Weight:
        """Return the weight with its values expanded for activations of dtype."""
        packed = (
            self.weight if dtype is torch.bfloat16 and supports_int8pack_mm(self.shape[1]) else None
        )
        return replace(self, weight=pad_columns_for_amx(self.weight.to(dtype)), packed=packed)

    def to(self, device: str) -> Int8Weight:
        """Return a copy on the device."""
        return Int8Weight(self.weight.to(device), self.scale.to(device))

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Int8Weight:
        """Return the given row ranges and one column range, for one rank."""
        return Int8Weight(slice_tensor(self.weight, rows, columns), slice_tensor(self.scale, rows))
