"""Product of clustered integers (RPTQ, Yuan et al. 2023, arXiv:2304.01089), in integer arithmetic.

Columns are those of the reordered input, in groups of ``group``; a cluster of any size is padded to
a whole group with columns whose q is 0. In group g a weight is scale[n, g] · w + offset[n, g]
(offset: 4 bits only), and an input is step[g] · (q − z_g):

    y[t, n] = Σ_g step · (scale · A_g + offset · Q_g) + constant[n]

with A_g = q_g · w_gᵀ and Q_g = Σ q_g in int32. The contribution of the zero-points z is constant =
−Σ_g step · z_g · (scale · Σ w + offset · K_g), K_g the number of real columns. A is converted to
float32 once per group, because a step that varies along K cannot be factored out of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from modelmill.ops.case import Case, nbytes
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.int4_linear import pack_codes, unpack_codes
from modelmill.ops.kernel_support import GemmProblem, make_gemm_problem
from modelmill.ops.op_cost import gemm_cost
from modelmill.ops.quant_types import exact_int_matmul

# Outputs have about unit scale; the terms that cancel (zero-points) are several times larger.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class RptqLinearInputs(NamedTuple):
    """Clustered integers and their steps, the weight, what is added; G = P / group groups.

    Attributes:
        q: [T, P] int8, P a multiple of group.
        weight: [N, P] int8, [N, P/2] uint8 (packed as in int4_linear), or the codes as float32 [G,
            group, N].
        scale: [N, G] float16 or float32.
        offset: [N, G] float16 or float32, with packed weights only; or None.
        group: columns of a group, a multiple of 32.
        step: [G] or [T, G] float32.
        constant: [N] float32 or None.
        bias: [N] of ``dtype`` or None.
        dtype: dtype of the output.
    """

    q: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    group: int
    step: torch.Tensor
    constant: torch.Tensor | None
    bias: torch.Tensor | None
    dtype: torch.dtype


def make_rptq_problem(*operands: Any) -> GemmProblem:
    """The product of ``RptqLinearInputs``."""
    inputs = RptqLinearInputs(*operands)
    return make_gemm_problem(
        inputs.q,
        inputs.weight,
        inputs.scale,
        inputs.bias,
        group=inputs.group,
        offset=inputs.offset,
        out_dtype=inputs.dtype,
    )


DECLARATION = OpDeclaration(
    inputs=RptqLinearInputs, problem=make_rptq_problem, per_call="step", cost=gemm_cost
)


def rptq_linear(inputs: RptqLinearInputs) -> torch.Tensor:
    """Multiply clustered integer activations with integer weights.

    Returns:
        [T, N] of ``dtype``.
    """
    q, weight, scale, offset, group, step, constant, bias, dtype = inputs
    acc_dtype = torch.promote_types(step.dtype, torch.float32)
    columns = q.shape[1]
    if weight.is_floating_point():
        return _batched_group_product(
            q, weight, scale, offset, group, step, (constant, bias), acc_dtype
        ).to(dtype)
    codes = weight if weight.dtype is torch.int8 else unpack_codes(weight, columns)
    out = torch.zeros(q.shape[0], codes.shape[0], dtype=acc_dtype, device=q.device)
    # float32 represents all integers up to 2²⁴; larger sums need float64
    max_sum = 128 * (128 if weight.dtype is torch.int8 else 15) * group
    exact = torch.float32 if max_sum <= 1 << 24 else torch.float64
    steps = step.to(acc_dtype).expand(q.shape[0], -1)
    for g in range(columns // group):
        columns_of_group = slice(g * group, (g + 1) * group)
        q_group = q[:, columns_of_group].to(exact)
        product = (q_group @ codes[:, columns_of_group].to(exact).T).to(acc_dtype) * scale[:, g].to(
            acc_dtype
        )
        if offset is not None:
            product += q_group.sum(-1, keepdim=True).to(acc_dtype) * offset[:, g].to(acc_dtype)
        out += product * steps[:, g, None]
    for addend in (constant, bias):
        out = out if addend is None else out + addend.to(acc_dtype)
    return out.to(dtype)


def _batched_group_product(
    q: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    step: torch.Tensor,
    addends: tuple[torch.Tensor | None, ...],
    acc_dtype: torch.dtype,
) -> torch.Tensor:
    """The same numbers, rounded in the same places, with all groups in one call.

    codes: [G, group, N] float32. addends: added at the end, None is skipped.
    """
    rows = q.shape[0]
    q_groups = q.view(rows, -1, group).transpose(0, 1)
    product = exact_int_matmul(q_groups, codes.mT).to(acc_dtype) * scale.T.to(acc_dtype)[:, None]
    if offset is not None:
        product += q_groups.sum(-1, keepdim=True).to(acc_dtype) * offset.T.to(acc_dtype)[:, None]
    product *= step.to(acc_dtype).expand(rows, -1).T[..., None]
    out = torch.zeros(rows, codes.shape[2], dtype=acc_dtype, device=q.device)
    for part in product:  # in order, because each sum is rounded
        out += part
    for addend in addends:
        out = out if addend is None else out + addend.to(acc_dtype)
    return out


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """8 and 4 bits, static and dynamic steps, groups of 32 or more, clusters of 1 channel."""
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
    """Cases of (rows, columns, outputs, columns of a group, bits of the weight)."""
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
    """Seeded arguments for outputs of about unit scale.

    The second group holds one channel, the last group is half full.
    """
    generator = torch.Generator().manual_seed(rows + columns + n)
    groups = columns // group
    real = torch.full((groups,), group)
    real[-1] = max(group // 2, 1)
    if groups > 2:
        real[1] = 1
    is_real = (torch.arange(group) < real[:, None]).reshape(-1)
    q = torch.randint(-128, 128, (rows, columns), generator=generator) * is_real
    low, high = (-127, 128) if bits == 8 else (0, 16)
    w = torch.randint(low, high, (n, columns), generator=generator) * is_real
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
