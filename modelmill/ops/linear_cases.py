"""Cases of the matrix products: their seeded operands, traffic and arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from modelmill.ops.case import Case, nbytes, randn

Shape = tuple[int, int, int]  # rows, K, N
DENSE_SHAPES: list[Shape] = [
    (1, 576, 1536), (5, 100, 33), (33, 576, 960), (1, 1536, 576), (2, 65, 7),
]  # fmt: skip
# one row of the products of a 7B decoder
DECODE_7B_SHAPES: list[Shape] = [
    (1, 4096, 12288), (1, 4096, 4096), (1, 4096, 22016), (1, 11008, 4096),
]  # fmt: skip


def linear_case(
    args: dict[str, Any], *, gated: bool = False, suffix: str = "", writes: tuple[str, ...] = ()
) -> Case:
    """The case of a product with these arguments: x [T, K], the weight's N rows and others.

    Args:
        args: arguments of the op; every tensor is read once.
        gated: whether gate and up rows of the weight make N / 2 columns of the output.
        suffix: end of the case's name.
        writes: names of arguments that the op writes in place.
    """
    x = args["x"]
    (rows, k), n = x.shape, args["weight"].shape[0]
    columns = n // 2 if gated else n
    read = nbytes(*(each for each in args.values() if isinstance(each, torch.Tensor)))
    moved = read + rows * columns * args.get("dtype", x.dtype).itemsize
    name = f"{rows}x{k}->{'2x' if gated else ''}{columns}{suffix}"
    return Case(name, args, moved, 2 * rows * k * n, writes=writes)


def dense_args(
    rows: int,
    k: int,
    n: int,
    *,
    device: str,
    dtype: torch.dtype,
    x_seed: int,
    has_bias: bool,
    gated: bool = False,
) -> dict[str, Any]:
    """Seeded x [rows, k], weight [n, k] (gated: [2 n, k]) and bias, for outputs of unit scale."""
    weight_rows = 2 * n if gated else n
    return {
        "x": randn(rows, k, device=device, dtype=dtype, seed=x_seed),
        "weight": randn(weight_rows, k, device=device, dtype=dtype, seed=k + n, scale=k**-0.5),
        "bias": randn(weight_rows, device=device, dtype=dtype, seed=n) if has_bias else None,
    }
