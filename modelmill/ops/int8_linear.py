"""Matrix product with int8 weights, one float scale per output channel; activations stay floating
point.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.linear import linear

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}

# Up to so many rows torch's product with packed int8 beats one with widened weights, which are read
# twice as long.
PACKED_ROWS = 4
# Its vectors take whole runs of columns, and read beyond the end of a row that is none.
PACKED_COLUMNS = 32


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [T, K] float; weight: [N, K] int8; scale: [N] float32; bias: [N] of x's dtype. Returns [T,
    N] of x's dtype.

    The product with the integers is taken in x's dtype (small integers are exact in bfloat16 and
    float16), the
    scale is applied to the float32 sums, rounded to x's dtype. weight may already be of x's dtype
    and filled up with zeros (expanded).
    """
    if weight.shape[1] > x.shape[-1]:
        x = F.pad(x, (0, weight.shape[1] - x.shape[-1]))
    if weight.dtype is torch.int8 and takes_packed(x):
        sums = torch._weight_int8pack_mm(
            x.contiguous(), weight.contiguous(), x.new_ones(weight.shape[0])
        )
    else:
        sums = linear(x, weight.to(x.dtype))
    if bias is None:
        return sums.mul_(scale)  # in float32, rounded where it is stored
    return (sums * scale + bias).to(x.dtype)


def takes_packed(x: torch.Tensor) -> bool:
    """Whether x [T, K] is multiplied with int8 weights as they are, by torch's own product: a few
    rows of bfloat16.
    """
    few = x.dim() == 2 and 0 < x.shape[0] <= PACKED_ROWS and x.device.type == "cpu"
    return few and x.dtype is torch.bfloat16 and packable(x.shape[1]) and not x.requires_grad


def packable(columns: int) -> bool:
    """Whether torch has such a product for rows of so many columns on this processor."""
    return columns > 0 and columns % PACKED_COLUMNS == 0 and _multiplies_packed()


@functools.cache
def _multiplies_packed() -> bool:
    """Whether torch multiplies with packed int8 in vectors here, and rightly: the op is none of its
    public ones.
    """
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False  # number by number, or never measured (arm64)
    x = (torch.arange(64) % 7 - 3).to(torch.bfloat16)[None]
    weight = (torch.arange(192) % 11 - 5).to(torch.int8).view(3, 64)
    try:
        sums = torch._weight_int8pack_mm(x, weight, x.new_ones(3))
    except (AttributeError, RuntimeError, TypeError):
        return False
    # whole numbers below 256: every order of adding gives the same
    return torch.equal(sums, F.linear(x.float(), weight.float()).to(torch.bfloat16))


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to nearest, symmetric, per row: (int8 [N, K], float32 [N]). A zero row gets scale 1."""
    wide = weight.float()
    peak = wide.abs().amax(-1)
    # a tensor: by a bare number GPUs divide with its reciprocal, and the last bit would depend on
    # the machine
    scale = peak / torch.full_like(peak, 127.0)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(wide / scale[:, None]).clamp(-127, 127).to(torch.int8), scale


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """As for linear."""
    shapes = [(1, 576, 1536), (5, 100, 33), (33, 576, 960), (1, 1536, 576), (2, 65, 7)]
    if device != "cpu":
        shapes += [
            (1, 4096, 12288),
            (1, 4096, 4096),
            (1, 4096, 22016),
            (1, 11008, 4096),
            (8, 4096, 4096),
        ]
    for rows, k, n in shapes:
        x = randn(rows, k, device=device, dtype=dtype, seed=rows + k + n)
        q, scale = quantize(
            randn(n, k, device=device, dtype=torch.float32, seed=k + n, scale=k**-0.5)
        )
        bias = randn(n, device=device, dtype=dtype, seed=n) if n % 2 else None
        moved = nbytes(x, q, scale, bias) + rows * n * x.element_size()
        yield Case(
            f"{rows}x{k}->{n}",
            {"x": x, "weight": q, "scale": scale, "bias": bias},
            moved,
            2 * rows * k * n,
        )
