"""The angles of a step's rotary embeddings (Su et al.

2021, arXiv:2104.09864), and Qwen v1's logn factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, nbytes

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def rope_cos_sin(
    positions: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    factor: float = 1.0,
    logn: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(cos, sin, logn factors) of each token, computed once for all layers.

    positions: [T] int64. keys: [T] int64, which row of ``table`` [K, D/2] float32 holds a token's
    frequencies; not read where there is one row. factor: on cos and sin. logn: the length from
    which queries grow by log(position + 1) / log(logn), or None; these factors are rounded to
    ``dtype``. Returns cos, sin: [T, D/2] float32, and the factors
    [T] float32 or None. Angles are rounded to float32, as in the original models.
    """
    frequencies = table[0] if len(table) == 1 else table[keys]
    angles = (positions[:, None] * frequencies.float()).to(table.dtype)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    if logn is None:
        return cos, sin, None
    growth = (torch.log(positions + 1.0) / math.log(logn)).clamp(min=1.0)
    return cos, sin, growth.to(dtype).float()


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """One row of frequencies and several; with and without a factor and logn; one token, odd
    numbers, far positions.
    """
    shapes = (
        (1, 64, 1, 5),
        (37, 40, 1, 4096),
        (300, 64, 32, 131_072),
        (5, 3, 4, 9000),
        (1024, 64, 32, 1024),
    )
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
