"""Rotary embedding angles of a step (RoPE, Su et al. 2021, arXiv:2104.09864), and logn factors.

The logn factors are those of Qwen v1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from modelmill.ops.case import Case, nbytes
from modelmill.ops.declaration import OpDeclaration

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class RopeCosSinInputs(NamedTuple):
    """Positions of a step's tokens and their frequencies.

    Attributes:
        positions: [T] int64.
        keys: [T] int64, the row of ``table`` with the token's frequencies; not read if there is one
            row.
        table: [K, D/2] float32, frequencies.
        factor: multiplied with cos and sin.
        logn: length beyond which queries are scaled by log(position + 1) / log(logn), or None.
        dtype: the logn factors are rounded to it.
    """

    positions: torch.Tensor
    keys: torch.Tensor
    table: torch.Tensor
    factor: float = 1.0
    logn: int | None = None
    dtype: torch.dtype = torch.float32


DECLARATION = OpDeclaration(inputs=RopeCosSinInputs)


def rope_cos_sin(
    inputs: RopeCosSinInputs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute cos, sin and logn factors of each token, once for all layers.

    Angles are rounded to float32, as in the original models.

    Returns:
        (cos [T, D/2] float32, sin [T, D/2] float32, factors [T] float32 or None).
    """
    positions, keys, table, factor, logn, dtype = inputs
    frequencies = table[0] if len(table) == 1 else table[keys]
    angles = (positions[:, None] * frequencies.float()).to(table.dtype)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    if logn is None:
        return cos, sin, None
    logn_factors = (torch.log(positions + 1.0) / math.log(logn)).clamp(min=1.0)
    return cos, sin, logn_factors.to(dtype).float()


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """One or several rows of frequencies; with and without factor and logn; far positions."""
    shapes = [(1, 64, 1, 5), (37, 40, 1, 4096), (300, 64, 32, 131_072)]
    shapes += [(5, 3, 4, 9000), (1024, 64, 32, 1024)]
    for number, (tokens, half, rows, longest) in enumerate(shapes):
        generator = torch.Generator().manual_seed(number)
        positions = torch.randint(longest, (tokens,), generator=generator).to(device)
        keys = torch.randint(rows, (tokens,), generator=generator).to(device)
        table = 1e4 ** -(torch.arange(half) / half) * (1 + torch.arange(rows)[:, None] / 8)
        args = {"positions": positions, "keys": keys, "table": table.to(device), "dtype": dtype}
        if number % 2:
            args["factor"] = 1.25
        if rows > 1:
            args["logn"] = 512
        yield Case(f"{tokens}x{half}-{rows}", args, nbytes(positions, keys) + 8 * tokens * half)
