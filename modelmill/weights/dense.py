"""A weight held as it is, in the activations' dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from modelmill.ops.shelf import Ops
from modelmill.weights.held import FLOATS, Layout, cut


@dataclass(frozen=True)
class Held:
    """weight: [N, K] float32, float16 or bfloat16, rows are outputs."""

    weight: torch.Tensor
    kind: str = "dense"
    grain: int = 1

    LAYOUT: ClassVar[Layout] = {"weight": (2, FLOATS)}

    @staticmethod
    def pack(weight: torch.Tensor, dtype: torch.dtype) -> Held:
        """Cast to ``dtype``, round to nearest even."""
        return Held(weight.to(dtype).contiguous())

    @staticmethod
    def packed_info(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"weight": (shape, dtype)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Held:
        return Held(tensors["weight"])

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        return ops.linear(x, self.weight, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:
        return None if ops.gated_linear is None else ops.gated_linear(x, self.weight, bias)

    def added(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, ops: Ops
    ) -> torch.Tensor | None:
        """The product and bias added to ``residual``, in its place; None where no op does that here."""
        return None if ops.add_linear is None else ops.add_linear(x, self.weight, residual, bias)

    def rotated(
        self, x: torch.Tensor, bias: torch.Tensor | None, where: tuple[Any, ...], ops: Ops
    ) -> torch.Tensor | None:
        """Queries [T, heads, D], keys and values stored (``rope_cache`` has ``where``); None where no op does that."""
        return None if ops.rope_linear is None else ops.rope_linear(x, self.weight, bias, *where)

    def dense(self) -> torch.Tensor:
        return self.weight.float()

    def to(self, device: str) -> Held:
        return Held(self.weight.to(device))

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Held:
        return Held(cut(self.weight, rows, columns))
