"""Short causal convolution of each channel (Mamba, arXiv:2312.00752), with or without SiLU.

Its state is the last inputs of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.op_cost import recurrence_cost
from modelmill.ops.recurrent_metadata import (
    RecurrentStepMetadata,
    format_case_lengths,
    gather_states,
    random_recurrent_metadata,
    store_snapshots,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


class CausalConvInputs(NamedTuple):
    """The operands.

    Attributes:
        x: [T, C'], of which the first C channels are convolved.
        state: [slots, W − 1, C], the last inputs of each sequence, oldest first; written in place.
        weight: [C, W], the weight of the token itself last.
        bias: [C] or None.
        rows: the sequences of the step.
        silu: whether SiLU follows.
    """

    x: torch.Tensor
    state: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    rows: RecurrentStepMetadata
    silu: bool = True


DECLARATION = OpDeclaration(
    inputs=CausalConvInputs, cost=partial(recurrence_cost, operations_per_state_value=2)
)


def causal_conv(inputs: CausalConvInputs) -> torch.Tensor:
    """Compute Σ_j weight[:, j] · x[t − W + 1 + j] + bias of each sequence, and SiLU of it.

    Returns [T, C] in x's dtype. Terms are added in one order, from the oldest token on, so that a
    token's result does not depend on how many tokens a step has.
    """
    x, state, weight, bias, rows, silu = inputs
    finish = _silu_to_dtype if silu else _cast_to_dtype
    channels, width = weight.shape
    x = x[:, :channels]
    if rows.is_decode:
        window = torch.cat((gather_states(state, rows), x[:, None]), 1)
        store_snapshots(state, window[:, :-1], rows.positions, rows)
        state[rows.slots] = window[:, 1:]
        store_snapshots(state, window[:, 1:], rows.positions + 1, rows)
        return finish(_weighted_sum([window[:, j] for j in range(width)], weight, bias), x.dtype)
    out = x.new_zeros(x.shape)
    for seq in rows.sequences():
        count = seq.stop - seq.start
        window = torch.cat((seq.initial_state(state), x[seq.start : seq.stop]))
        shifted = [window[j : j + count] for j in range(width)]
        out[seq.start : seq.stop] = finish(_weighted_sum(shifted, weight, bias), x.dtype)
        state[seq.slot] = window[count:]
        kept = seq.snapshot_end - seq.first
        if 0 <= kept <= count:
            state[seq.snapshot_slot] = window[kept : kept + width - 1]
    return out


def _weighted_sum(
    terms: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The weighted sum of [n, C], float32."""
    factors = weight.float().unbind(1)
    total = terms[0].float() * factors[0]
    for term, factor in zip(terms[1:], factors[1:], strict=True):
        total = total + term.float() * factor
    return total if bias is None else total + bias.float()


def _silu_to_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return batch_invariant_silu(x).to(dtype)


def _cast_to_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


def batch_invariant_silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU of float32, each element by itself.

    On a CPU torch's exponential of an element depends on its place in the tensor by a unit in the
    last place; in float64 that is rounded away.
    """
    return F.silu(x.double()).float() if x.device.type == "cpu" else F.silu(x)


def batch_invariant_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid of float32, each element by itself, as ``batch_invariant_silu``."""
    return x.double().sigmoid().float() if x.device.type == "cpu" else x.sigmoid()


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Prompts of several lengths beside decodes, and decodes alone; widths 2 to 4."""
    shapes: list[ConvCaseShape] = [((5, 1, 17), 24, 4), ((1, 1, 1), 40, 3), ((33,), 64, 2)]
    yield from cases_for_shapes(shapes, device, dtype)


ConvCaseShape = tuple[tuple[int, ...], int, int]
"""(tokens of each sequence, channels, width)."""


def cases_for_shapes(
    shapes: Sequence[ConvCaseShape], device: str, dtype: torch.dtype
) -> Iterator[Case]:
    """Cases of these shapes; those of odd numbers have a bias, the third has no SiLU."""
    for number, (lengths, channels, width) in enumerate(shapes):
        rows, slots = random_recurrent_metadata(lengths, number, device)
        x = randn(sum(lengths), channels + 8, device=device, dtype=dtype, seed=number)
        state = randn(slots, width - 1, channels, device=device, dtype=dtype, seed=number + 5)
        weight = randn(channels, width, device=device, dtype=dtype, seed=number + 9)
        bias = randn(channels, device=device, dtype=dtype, seed=number + 3) if number else None
        inputs = CausalConvInputs(x, state, weight, bias, rows, silu=number != 2)
        moved = 2 * (nbytes(x) + len(lengths) * nbytes(state[0]))
        name = f"{format_case_lengths(lengths)}x{channels}x{width}"
        yield Case(name, inputs._asdict(), moved, writes=("state",))
