"""The stages of a vision reference and the norms that it used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class ReferenceStage:
    """One stage of a vision reference.

    Attributes:
        path: the engine's module, or module.method.
        layer: its number in the encoder, None outside.
    """

    path: str
    layer: int | None
    module: str
    inputs: tuple[Any, ...]
    expected: tuple[Tensor, ...]


@dataclass(frozen=True)
class ReferenceNorm:
    """A norm by the engine's path.

    channels_first: normalizes dimension 1 of an image instead of the last.
    """

    path: str
    weight: Tensor
    bias: Tensor
    eps: float
    channels_first: bool = False
    layer: int | None = None
    module: str = ""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x, from its definition."""
        dim = 1 if self.channels_first else -1
        mean = x.mean(dim, keepdim=True)
        spread = ((x - mean) ** 2).mean(dim, keepdim=True)
        shape = (-1, 1, 1) if self.channels_first else (-1,)
        return (x - mean) / (spread + self.eps).sqrt() * self.weight.view(shape) + self.bias.view(
            shape
        )
