"""Activations quantized to 8 (or 4) bits in clustered order, the input of ``rptq_linear``.

Steps are static, dynamic, or static with a fallback per token and group: where the integers of a
token would leave the range, that group of the token gets a longer step instead of being clipped.
With v = round(x · inv_scale) + zero_point, not clamped, and most = max(max |v| of the group, max),

    q = round(v · (max / most)),    step[t, g] = group_step[g] · (most / max)

so that q is the static integer where none leaves ±max, and ``rptq_linear`` takes the steps as
those of a token and group, its constant for the zero-points unchanged: step · q is group_step · v.
v is an integer, so that every backend finds the same one, and with it the same ``most`` and q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.quant_types import MIN_AMAX, ActQuantSpec
from modelmill.ops.rms_norm_quant import quant_min_max, quantize_rows
from modelmill.ops.row_op_support import RowOpProblem, make_row_op_problem

# In integer steps: a value halfway between two integers may be rounded to either.
TOLERANCE = {torch.float32: 1.0, torch.float16: 1.0, torch.bfloat16: 1.0}


class RptqQuantInputs(NamedTuple):
    """Activations, their order of columns and how they are rounded.

    Attributes:
        x: [T, K] floating point; gated: [T, 2·K].
        perm: [P] int32; column i of q is x's column perm[i], or 0 where that is −1.
        inv_scale: [P] float32 (static), as in rms_norm_quant; None: each token and group has its
            own step = max(amax, 1e-6) / max with max = 2^(bits − 1) − 1, and q = x · (max / amax),
            rounded half to even.
        zero_point: [P] int32 (static), as in rms_norm_quant, or None.
        bits: 8 or 4.
        group: columns of a group.
        gated: quantize silu(first half) · second half, rounded to x's dtype, instead of x.
        group_step: [P / group] float32, the static step of each group, for the fallback; it takes
            inv_scale and zero_point. None: static scales clip.
    """

    x: torch.Tensor
    perm: torch.Tensor
    inv_scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    bits: int
    group: int
    gated: bool = False
    group_step: torch.Tensor | None = None


def _make_problem(
    x: torch.Tensor,
    perm: torch.Tensor,
    inv_scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    bits: int,
    group: int,
    gated: bool,
    group_step: torch.Tensor | None,
) -> RowOpProblem:
    has_own_steps = inv_scale is None or group_step is not None
    group = group if has_own_steps else 0
    spec = ActQuantSpec(torch.int8, inv_scale, zero_point, perm, bits)
    return make_row_op_problem(x, spec=spec, group=group, gated=gated)


DECLARATION = OpDeclaration(inputs=RptqQuantInputs, problem=_make_problem, guard=make_row_op_guard)


def rptq_quant(inputs: RptqQuantInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Permute x into clusters and quantize it.

    Returns:
        (q [T, P] int8, step [T, P / group] float32 or None if static without fallback).
    """
    x, perm, inv_scale, zero_point, bits, group, gated, group_step = inputs
    if gated:
        gate, up = x.chunk(2, -1)
        x = F.silu(gate) * up
    if inv_scale is not None and group_step is None:
        spec = ActQuantSpec(torch.int8, inv_scale, zero_point, perm, bits)
        return quantize_rows(x, spec)[0], None
    max_value = quant_min_max(torch.int8, bits, has_zero_point=False)[1]
    clustered = x.float()[:, perm.clamp(min=0).long()]
    if group_step is not None:
        assert inv_scale is not None and zero_point is not None, "a fallback of static scales"  # noqa: PT018
        clustered = (clustered * inv_scale).round() + zero_point
    clustered = torch.where(perm >= 0, clustered, 0.0).view(x.shape[0], -1, group)
    min_amax = MIN_AMAX if group_step is None else max_value
    amax = clustered.abs().amax(-1, keepdim=True).clamp(min=min_amax)
    # torch computes number / tensor as number · reciprocal: two roundings, kernels have one
    inverse = torch.full_like(amax, max_value) / amax
    q = (clustered * inverse).round().clamp(-max_value, max_value)
    step = (amax / max_value)[..., 0]
    return q.to(torch.int8).view(x.shape[0], -1), step if group_step is None else step * group_step


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Static and dynamic, 8 and 4 bits, with and without a gate, clusters of all sizes."""
    sizes = [(1, 96, 32), (7, 100, 32), (3, 300, 128), (18, 612, 256), (21, 260, 64)]
    sizes += (
        []
        if device == "cpu"
        else [(1, 11008, 128), (64, 4096, 128), (130, 612, 256), (135, 260, 64)]
    )
    yield from cases_for_shapes(sizes, device, dtype)


def cases_for_shapes(
    sizes: Sequence[tuple[int, int, int]], device: str, dtype: torch.dtype, *, full: bool = False
) -> Iterator[Case]:
    """Cases of (rows, width, maximum channels of a cluster).

    full: each cluster has the maximum, and the input is gated.
    """
    for number, (rows, width, group) in enumerate(sizes):
        generator = torch.Generator().manual_seed(width)
        channels = torch.randperm(width, generator=generator)
        parts: list[torch.Tensor] = []
        start = 0
        while start < width:
            random_size = (
                1
                if len(parts) == 1
                else int(torch.randint(1, group + 1, (1,), generator=generator))
            )
            size = min(width - start, group if full else random_size)
            parts.append(F.pad(channels[start : start + size], (0, group - size), value=-1))
            start += size
        order = torch.cat(parts).int()
        factor = torch.rand(len(order), generator=generator) * 40 + 10
        zero = torch.randint(-90, 90, order.shape, generator=generator).int()
        for bits in (8, 4):
            gated = full or (number + bits) % 3 == 0
            x = randn(
                rows,
                2 * width if gated else width,
                device=device,
                dtype=dtype,
                seed=width,
                scale=2.0,
            )
            shared = {
                "x": x,
                "perm": order.to(device),
                "bits": bits,
                "group": group,
                "gated": gated,
            }
            shrink = 1 if bits == 8 else 16
            static = {
                "inv_scale": (factor / shrink).to(device),
                "zero_point": (zero // shrink).to(device),
            }
            name = f"{rows}x{width} a{bits}{' gated' if gated else ''}"
            yield Case(f"{name} static", shared | static, nbytes(x) + rows * len(order))
            steps = 4 * rows * (len(order) // group)  # one float32 per cluster
            group_step = torch.rand(len(order) // group, generator=generator) / 64
            yield Case(
                f"{name} fallback",
                shared | static | {"group_step": group_step.to(device)},
                nbytes(x) + rows * len(order) + steps,
            )
            yield Case(
                f"{name} dynamic",
                shared | {"inv_scale": None, "zero_point": None},
                nbytes(x) + rows * len(order) + steps,
            )
