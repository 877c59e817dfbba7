"""RMSNorm of groups of channels, and the gate silu(z): the end of a recurrent mixer.

Gated DeltaNet norms each head, then gates (arXiv:2412.06464). Mamba2 gates, then norms each group
(arXiv:2405.21060), or the other way round, or gates alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.causal_conv import batch_invariant_silu
from modelmill.ops.declaration import OpDeclaration

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}


class GatedRMSNormInputs(NamedTuple):
    """The operands.

    Attributes:
        x: [T, N] float32, a recurrence's output.
        gate: [T, N] z, in the dtype of the result.
        weight: [N], or [group] for all groups alike; None: nothing is normed.
        eps: added to the mean square.
        group: channels that are normed together; N is a multiple of it.
        gate_first: whether the norm is that of the gated values.
    """

    x: torch.Tensor
    gate: torch.Tensor
    weight: torch.Tensor | None
    eps: float
    group: int
    gate_first: bool


DECLARATION = OpDeclaration(inputs=GatedRMSNormInputs)


def gated_rms_norm(inputs: GatedRMSNormInputs) -> torch.Tensor:
    """rms_norm(x) · weight · silu(gate), or rms_norm(x · silu(gate)) · weight; [T, N].

    Everything is float32 until the result is rounded to the gate's dtype.
    """
    x, gate, weight, eps, group, gate_first = inputs
    factor = batch_invariant_silu(gate.float())
    if weight is None:
        return (x * factor).to(gate.dtype)
    grouped = (x * factor if gate_first else x).unflatten(1, (-1, group))
    scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    normed = grouped * scale * weight.float().view(-1, group)
    normed = normed.flatten(1)
    return (normed if gate_first else normed * factor).to(gate.dtype)


GatedNormCaseShape = tuple[int, int, int, str]
"""(tokens, channels, of a group, what is normed)."""
NORM_PER_HEAD, NORM_CHANNEL_GROUPS, NORM_AFTER_GATE, NO_NORM_WEIGHT = (
    "heads",
    "channels",
    "gated",
    "nothing",
)
"""x by one weight for all groups; x; the gated values; nothing."""


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Heads and wider groups, sizes that are no powers of two, both orders, no norm."""
    shapes: list[GatedNormCaseShape] = [
        (1, 64, 16, NORM_PER_HEAD), (5, 72, 24, NORM_CHANNEL_GROUPS),
        (3, 100, 100, NORM_AFTER_GATE), (2, 40, 40, NO_NORM_WEIGHT),
    ]  # fmt: skip
    yield from cases_for_shapes(shapes, device, dtype)


def cases_for_shapes(
    shapes: Sequence[GatedNormCaseShape], device: str, dtype: torch.dtype
) -> Iterator[Case]:
    """Cases of these shapes; the gate is the end of a wider row."""
    for number, (tokens, width, group, normed) in enumerate(shapes):
        x = randn(tokens, width, device=device, dtype=torch.float32, seed=number)
        projected = randn(tokens, 2 * width + 8, device=device, dtype=dtype, seed=number + 1)
        gate = projected[:, width + 8 :]
        channels = group if normed == NORM_PER_HEAD else width
        weight = randn(channels, device=device, dtype=dtype, seed=number + 2) + 1
        inputs = GatedRMSNormInputs(
            x,
            gate,
            None if normed == NO_NORM_WEIGHT else weight,
            1e-6,
            group,
            normed == NORM_AFTER_GATE,
        )
        moved = nbytes(x) + 2 * nbytes(gate) + nbytes(inputs.weight)
        yield Case(f"{tokens}x{width}/{group}-{normed}", inputs._asdict(), moved)
