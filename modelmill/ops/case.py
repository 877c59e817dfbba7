"""A case of an op: named arguments with which every implementation is tested and timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

RowShapes = Sequence[tuple[int, int]]
"""(rows, width) of several cases."""


@dataclass(frozen=True)
class Case:
    """Arguments for one call of an op.

    Attributes:
        name: shown in test ids and benchmark tables.
        args: keyword arguments of the op.
        bytes_moved: minimum device-memory traffic (each input read once, each output written once).
        flops: arithmetic operations, for compute-bound ops.
        writes: names of arguments that the op writes in place.
        meta: further data for a test or benchmark.
    """

    name: str
    args: dict[str, Any]
    bytes_moved: int = 0
    flops: int = 0
    writes: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Total size of the tensors in bytes; None counts as 0."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def randn(
    *shape: int, device: str, dtype: torch.dtype, seed: int, scale: float = 1.0
) -> torch.Tensor:
    """Seeded normal values; small tensors are generated on the CPU, large ones on the device."""
    generator_device = "cpu" if device == "cpu" or _product(shape) < 1 << 22 else device
    generator = torch.Generator(generator_device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=generator_device) * scale).to(
        device=device, dtype=dtype
    )


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
