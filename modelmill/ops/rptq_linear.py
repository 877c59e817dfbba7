"""Product of clustered integers (RPTQ, Yuan et al. 2023, arXiv:2304.01089, in true integer
arithmetic).

Columns are those of the reordered input, in groups of ``group``; a cluster of any size fills a
group up with columns whose q is 0. In group g a weight is scale[n, g] · w + offset[n, g] (offset: 4
bit alone), an input step[g] · (q − z_g):

    y[t, n] = Σ_g step · (scale · A_g + offset · Q_g) + constant[n],   A_g = q_g · w_gᵀ and Q_g = Σ q_g in int32

constant: what the zero-points z amount to, −Σ_g step · z_g · (scale · Σ w + offset · K_g), K_g the
real columns. A is flushed to float32 once a group, because a step that varies along K cannot be
undone afterwards.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from modelmill.ops.case import Case, nbytes
from modelmill.ops.int4_linear import pack_codes, unpack_codes
from modelmill.ops.quant_types import exact_int_matmul

# Sums of about unit size; the parts that cancel (zero-points) are several times larger.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def rptq_linear(
    q: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    step: torch.Tensor,
    constant: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """q: [T, P] int8, P a multiple of group, group one of 32. weight: [N, P] int8 or [N, P/2] uint8
    (as int4_linear).

    scale, offset: [N, G] float16 or float32, G = P / group; offset with packed weights only. step:
    [G] or [T, G] float32. constant: [N] float32. bias: [N] of ``dtype``. Returns [T, N] of
    ``dtype``. weight may be float32
    [G, group, N] that holds the codes (expanded).
    """
    wide = torch.promote_types(step.dtype, torch.float32)
    columns = q.shape[1]
    if weight.is_floating_point():
        return _batched_group_product(
            q, weight, scale, offset, group, step, (constant, bias), wide
        ).to(dtype)
    codes = weight if weight.dtype is torch.int8 else unpack_codes(weight, columns)
    out = torch.zeros(q.shape[0], codes.shape[0], dtype=wide, device=q.device)
    # float32 holds every sum of up to 2²⁴; beyond, float64 does
    most = 128 * (128 if weight.dtype is torch.int8 else 15) * group
    exact = torch.float32 if most <= 1 << 24 else torch.float64
    steps = step.to(wide).expand(q.shape[0], -1)
    for g in range(columns // group):
        part = slice(g * group, (g + 1) * group)
        mine = q[:, part].to(exact)
        product = (mine @ codes[:, part].to(exact).T).to(wide) * scale[:, g].to(wide)
        if offset is not None:
            product += mine.sum(-1, keepdim=True).to(wide) * offset[:, g].to(wide)
        out += product * steps[:, g, None]
    for more in (constant, bias):
        out = out if more is None else out + more.to(wide)
    return out.to(dtype)


def _batched_group_product(
    q: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    step: torch.Tensor,
    more: tuple[torch.Tensor | None, ...],
    wide: torch.dtype,
) -> torch.Tensor:
    """The same numbers, rounded in the same places, with all groups in one call.

    codes: [G, group, N] float32.
    """
    rows = q.shape[0]
    mine = q.view(rows, -1, group).transpose(0, 1)
    product = exact_int_matmul(mine, codes.mT).to(wide) * scale.T.to(wide)[:, None]
    if offset is not None:
        product += mine.sum(-1, keepdim=True).to(wide) * offset.T.to(wide)[:, None]
    product *= step.to(wide).expand(rows, -1).T[..., None]
    out = torch.zeros(rows, codes.shape[2], dtype=wide, device=q.device)
    for part in product:  # one after another: sums are rounded
        out += part
    for each in more:
        out = out if each is None else out + each.to(wide)
    return out


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """8 and 4 bit, static and dynamic steps, groups of 32 to all columns, with clusters of 1
    channel among them.
    """
    shapes = [
        (1, 96, 40, 32, 8),
        (7, 320, 33, 64, 4),
        (64, 256, 65, 128, 4),
        (5, 160, 31, 160, 8),
        (3, 96, 9, 32, 4),
    ]
    if device != "cpu":
        shapes += [(1, 4352, 12288, 128, 8), (1, 11264, 4096, 128, 4), (64, 4352, 4096, 128, 8)]
    yield from cases_for_shapes(shapes, device, dtype)


def cases_for_shapes(
    shapes: Sequence[tuple[int, int, int, int, int]], device: str, dtype: torch.dtype
) -> Iterator[Case]:
    """Of (rows, columns, outputs, columns of a group, bits of the weight)."""
    for rows, columns, n, group, bits in shapes:
        for dynamic in (False, True):
            args = random_inputs(
                rows, columns, n, group, bits, dynamic=dynamic, device=device, dtype=dtype
            )
            moved = (
                nbytes(*(a for a in args.values() if isinstance(a, torch.Tensor)))
                + rows * n * dtype.itemsize
            )
            name = f"{rows}x{columns}->{n} w{bits} g{group}{' dynamic' if dynamic else ''}"
            yield Case(name, args, moved, 2 * rows * columns * n)


def random_inputs(
    rows: int,
    columns: int,
    n: int,
    group: int,
    bits: int,
    *,
    dynamic: bool,
    device: str,
    dtype: torch.dtype,
) -> dict[str, object]:
    """Seeded arguments whose outputs have about unit scale; the second group holds one channel, the
    last half.
    """
    generator = torch.Generator().manual_seed(rows + columns + n)
    groups = columns // group
    real = torch.full((groups,), group)
    real[-1] = max(group // 2, 1)
    if groups > 2:
        real[1] = 1
    inside = (torch.arange(group) < real[:, None]).reshape(-1)
    q = torch.randint(-128, 128, (rows, columns), generator=generator) * inside
    low, high = (-127, 128) if bits == 8 else (0, 16)
    w = torch.randint(low, high, (n, columns), generator=generator) * inside
    size = columns**-0.5 / (73 * (73 if bits == 8 else 5))
    scale = (torch.rand(n, groups, generator=generator) + 0.5) * size * 64
    step = (torch.rand((rows, groups) if dynamic else (groups,), generator=generator) + 0.5) / 64
    args: dict[str, object] = {
        "q": q.to(torch.int8).to(device),
        "weight": (w.to(torch.int8) if bits == 8 else pack_codes(w)).to(device),
        "scale": scale.half().to(device),
        "offset": (-7.5 * scale).half().to(device) if bits == 4 and columns != 96 else None,
        "group": group,
        "step": step.float().to(device),
        "constant": None if dynamic else torch.randn(n, generator=generator).to(device),
        "bias": torch.randn(n, generator=generator).to(device, dtype) if n % 2 else None,
        "dtype": dtype,
    }
    return args
