"""A weight held as it is, in the activations' dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from modelmill.ops.registry import Ops
from modelmill.weights.base import FLOAT_DTYPES, TensorLayout, slice_tensor


@dataclass(frozen=True)
class DenseWeight:
    """weight: [N, K] float32, float16 or bfloat16, rows are outputs."""

    weight: torch.Tensor
    format: str = "dense"
    alignment: int = 1

    LAYOUT: ClassVar[TensorLayout] = {"weight": (2, FLOAT_DTYPES)}

    @staticmethod
    def pack(weight: torch.Tensor, dtype: torch.dtype) -> DenseWeight:
        """Cast to ``dtype``, round to nearest even."""
        return DenseWeight(weight.to(dtype).contiguous())

    @staticmethod
    def packed_info(
        shape: tuple[int, int], dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"weight": (shape, dtype)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> DenseWeight:
        return DenseWeight(tensors["weight"])

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        return ops.linear(x, self.weight, bias)

    def try_linear_swiglu(
        self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops
    ) -> torch.Tensor | None:
        return None if ops.linear_swiglu is None else ops.linear_swiglu(x, self.weight, bias)

    def try_linear_add(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, ops: Ops
    ) -> torch.Tensor | None:
        """The product and bias added to ``residual``, in its place; None where no op does that
        here.
        """
        return None if ops.linear_add is None else ops.linear_add(x, self.weight, residual, bias)

    def try_qkv_rope(
        self, x: torch.Tensor, bias: torch.Tensor | None, rope_args: tuple[Any, ...], ops: Ops
    ) -> torch.Tensor | None:
        """Queries [T, heads, D], keys and values stored (rope_args: what ``rope_cache`` takes);
        None where no op does that."""
        return (
            None
            if ops.qkv_rope_cache is None
            else ops.qkv_rope_cache(x, self.weight, bias, *rope_args)
        )

    def dense(self) -> torch.Tensor:
        return self.weight.float()

    def to(self, device: str) -> DenseWeight:
        return DenseWeight(self.weight.to(device))

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> DenseWeight:
        return DenseWeight(slice_tensor(self.weight, rows, columns))
