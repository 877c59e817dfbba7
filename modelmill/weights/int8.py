"""Weight-only int8: symmetric, one float32 scale per output channel (row maximum / 127), activations untouched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from modelmill.core.errors import CorruptArtifact
from modelmill.ops.int8_linear import quantize
from modelmill.ops.shelf import Ops
from modelmill.weights.held import Expansion, Layout, cut, filled


@dataclass(frozen=True)
class Held:
    """weight: [N, K] int8 in [−127, 127]; scale: [N] float32."""

    weight: torch.Tensor
    scale: torch.Tensor
    kind: str = "int8"
    grain: int = 1

    LAYOUT: ClassVar[Layout] = {"weight": (2, (torch.int8,)), "scale": (1, (torch.float32,))}
    EXPANDS: ClassVar[Expansion] = Expansion("int8_linear", None)

    @staticmethod
    def pack(weight: torch.Tensor, dtype: torch.dtype) -> Held:  # noqa: ARG004  int8 is the same for every dtype
        return Held(*quantize(weight))

    @staticmethod
    def packed_info(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:  # noqa: ARG004
        return {"weight": (shape, torch.int8), "scale": ((shape[0],), torch.float32)}

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> Held:
        weight, scale = tensors["weight"], tensors["scale"]
        if len(scale) != len(weight):
            raise CorruptArtifact(f"an int8 weight has {len(weight)} rows and {len(scale)} scales; rebuild the engine")
        return Held(weight, scale)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "scale": self.scale}

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor:
        return ops.int8_linear(x, self.weight, self.scale, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, ops: Ops) -> torch.Tensor | None:
        return None if ops.gated_int8_linear is None else ops.gated_int8_linear(x, self.weight, self.scale, bias)

    def dense(self) -> torch.Tensor:
        return self.weight.float() * self.scale[:, None]

    def expanded(self, dtype: torch.dtype) -> Held:
        return replace(self, weight=filled(self.weight.to(dtype)))

    def to(self, device: str) -> Held:
        return Held(self.weight.to(device), self.scale.to(device))

    def slice(self, rows: Sequence[tuple[int, int]], columns: tuple[int, int]) -> Held:
        return Held(cut(self.weight, rows, columns), cut(self.scale, rows))
