"""An unquantized weight in the activations' dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from modelmill.ops.registry import Ops
from modelmill.ops.rope_cache import RopeCacheInputs
from modelmill.weights.base import (
    FLOAT_DTYPES,
    StoredTensorDimsAndDtypes,
    WeightFormat,
    slice_tensor,
)


@dataclass(frozen=True)
class DenseWeight(WeightFormat):
    """An unquantized matrix.

    Attributes:
        weight: [N, K] float32, float16 or bfloat16; rows are outputs.
    """

    weight: torch.Tensor
    format: str = "dense"

    STORED_TENSORS: ClassVar[StoredTensorDimsAndDtypes] = {"weight": (2, FLOAT_DTYPES)}

    @classmethod
    def pack(cls, weight: torch.Tensor, dtype: torch.dtype) -> DenseWeight:
        """Cast to ``dtype``, rounding to nearest even."""
        return DenseWeight(weight.to(dtype).contiguous())

    @classmethod
    def packed_tensor_specs(
        cls, shape: tuple[int, int], dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each stored tensor, by suffix."""
        return {"weight": (shape, dtype)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> DenseWeight:
        """Build the weight from its stored tensors by suffix."""
        return DenseWeight(tensors["weight"])

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the tensor; [N, K] for a weight."""
        return self.weight.shape[0], self.weight.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the stored tensors by suffix."""
        return {"weight": self.weight}

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        """Multiply [T, K] by the weight and add the bias: [T, N]."""
        return self.run_bound_op(ops.linear, x, self.weight, bias)

    def try_linear_swiglu(
        self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        """Compute the product and SwiGLU's gate in one op, or return None without such an op."""
        if ops.linear_swiglu is None:
            return None
        return self.run_bound_op(ops.linear_swiglu, x, self.weight, bias)

    def try_linear_add(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, ops: Ops
    ) -> torch.Tensor | None:
        """Add the product and bias to ``residual`` in place, or return None without such an op."""
        if ops.linear_add is None:
            return None
        return self.run_bound_op(ops.linear_add, x, self.weight, residual, bias)

    def try_qkv_rope_cache(
        self, x: torch.Tensor, bias: torch.Tensor | None, inputs: RopeCacheInputs, ops: Ops
    ) -> torch.Tensor | None:
        """Return queries [T, heads, D] after RoPE, with keys and values stored in the cache.

        Args:
            x: [T, K].
            bias: [N] or None.
            inputs: as of ``rope_cache``.
            ops: the ops of the device.

        Returns:
            The queries, or None if no op computes this.
        """
        if ops.qkv_rope_cache is None:
            return None
        return self.run_bound_op(ops.qkv_rope_cache, x, self.weight, bias, inputs)

    def dequantize(self) -> torch.Tensor:
        """Return the dequantized matrix [N, K] float32."""
        return self.weight.float()

    def to(self, device: str) -> DenseWeight:
        """Return a copy on the device."""
        return DenseWeight(self.weight.to(device))

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> DenseWeight:
        """Return the given row ranges and one column range, for one rank."""
        return DenseWeight(slice_tensor(self.weight, rows, columns))
