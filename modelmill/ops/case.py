"""A case of an op: named arguments that every variant is tested and timed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """Arguments for one call of an op.

    args: keyword arguments. bytes_moved: least device-memory traffic (each input read once, each
    output written
    once). flops: arithmetic, for compute-bound ops. writes: names of arguments that the op writes
    in place.
    """

    name: str
    args: dict[str, Any]
    bytes_moved: int = 0
    flops: int = 0
    writes: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Total size in bytes of the tensors given."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def randn(
    *shape: int, device: str, dtype: torch.dtype, seed: int, scale: float = 1.0
) -> torch.Tensor:
    """Seeded normal values, drawn in float32 on the CPU for small and on the device for large
    tensors.
    """
    where = "cpu" if device == "cpu" or _product(shape) < 1 << 22 else device
    generator = torch.Generator(where).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=where) * scale).to(
        device=device, dtype=dtype
    )


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
