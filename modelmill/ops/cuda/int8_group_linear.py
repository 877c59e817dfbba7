"""Products of a few rows with 8-bit weights in groups through the tensor cores (int8_groups.py)."""

from __future__ import annotations

import torch

from modelmill.ops.cuda import build, int8_groups
from modelmill.ops.cuda.narrow_weights import PIECE


def available(kind: str) -> str | None:
    """None where the kernel serves devices of this kind; else why not. Compiles the commonest form, once a machine."""
    form = int8_groups.form_of(1)
    common = int8_groups.macros_of(torch.bfloat16, form, PIECE, offset=False, wide=False, gated=False)
    return build.serves(kind, "int8_groups", common)


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> bool:
    """Up to 64 rows in 16 bits, K a multiple of 32, groups of 32, 64, 128, 256 … columns or of all; all packed."""
    return int8_groups.serves(x, weight, (scale, offset, group), bias)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference; sums in float32."""
    return int8_groups.product(x, weight, (scale, offset, group), bias, gated=False)
