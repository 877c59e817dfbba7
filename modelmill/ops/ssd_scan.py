"""The state space recurrence of Mamba2 (arXiv:2405.21060), token by token and in chunks.

Each head keeps a matrix S [P, N]. With Δ = softplus(dt + dt_bias), within limits, and a scalar A:

    S ← exp(−exp(A_log) Δ) S + Δ x Bᵀ,    y = S C + D x

A chunk of C tokens at once is the state space duality (section 6): with G the running sum of the
log decays, y_i = Σ_{j ≤ i} exp(G_i − G_j) Δ_j (C_i · B_j) x_j + exp(G_i) S C_i.
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
from modelmill.ops.recurrence import (
    Tokens,
    advance_states,
    expand_groups_to_heads,
    random_recurrence_case_args,
)
from modelmill.ops.recurrence_chunks import chunk_decays, split_into_chunks
from modelmill.ops.recurrent_metadata import RecurrentStepMetadata, format_case_lengths

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


class SSDScanInputs(NamedTuple):
    """The operands; H heads, of which H / groups consecutive ones share B and C.

    Attributes:
        xbc: [T, H·P + 2·groups·N], x | B | C behind the convolution.
        dt: [T, H] float32.
        a_log: [H].
        dt_bias: [H].
        skip: [H], D.
        dt_limit: least and largest Δ.
        state: [slots, H, P, N] float32, written in place.
        rows: the sequences of the step.
    """

    xbc: torch.Tensor
    dt: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor
    dt_limit: tuple[float, float]
    state: torch.Tensor
    rows: RecurrentStepMetadata


DECLARATION = OpDeclaration(
    inputs=SSDScanInputs, cost=partial(recurrence_cost, operations_per_state_value=4)
)


def ssd_scan(inputs: SSDScanInputs) -> torch.Tensor:
    """Advance the states by the step's tokens; returns y [T, H·P] float32."""
    tokens = _prepare_tokens(inputs)
    x, state, rows = tokens.x, inputs.state, inputs.rows
    out = torch.zeros_like(x)
    out = advance_states(state, rows, tokens, out, step=recurrent_step, chunks=compute_chunks)
    return (out + inputs.skip.to(x.dtype)[:, None] * x).flatten(1)


class SSDTokens(NamedTuple):
    """x [T, H, P], B, C [T, H, N] float32; log decay and Δ [T, H] float64."""

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    log_decay: torch.Tensor
    delta: torch.Tensor


def _prepare_tokens(inputs: SSDScanInputs) -> SSDTokens:
    heads, dim, size = inputs.state.shape[1:]
    x, shared = inputs.xbc.to(inputs.state.dtype).tensor_split((heads * dim,), 1)
    b, c = (expand_groups_to_heads(each, heads, size) for each in shared.chunk(2, 1))
    delta = F.softplus(inputs.dt.double() + inputs.dt_bias.double()).clamp(*inputs.dt_limit)
    log_decay = -inputs.a_log.double().exp() * delta
    x = x.unflatten(1, (heads, dim))
    return SSDTokens(x=x, b=b, c=c, log_decay=log_decay, delta=delta)


def recurrent_step(s: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of B sequences: outputs without D x [B, H, P], and the states behind."""
    x, b, c, log_decay, delta = tokens
    s = s * log_decay.exp().to(s.dtype)[..., None, None]
    s = s + (x * delta.to(s.dtype)[..., None])[..., None] * b[..., None, :]
    return (s * c[..., None, :]).sum(-1), s


def compute_chunks(
    s: torch.Tensor, tokens: Tokens, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole chunks of one sequence: outputs without D x [n, H, P], and the last state."""
    x, b, c, log_decay, delta = split_into_chunks(tokens, chunk)
    decays = chunk_decays(log_decay, s.dtype)
    x = x * delta.to(s.dtype)[..., None]
    out = (c @ b.transpose(-1, -2) * decays.between) @ x
    c = c * decays.since_start
    written = (x * decays.to_end).transpose(-1, -2) @ b
    for n in range(len(out)):
        out[n] += c[n] @ s.transpose(-1, -2)
        s = s * decays.whole[n] + written[n]
    return out.transpose(1, 2).flatten(0, 1), s


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Prompts beside decodes and decodes alone; B and C shared by all heads, or by some."""
    shapes: list[ScanCaseShape] = [
        ((5, 1, 11), 2, 4, 8, 16), ((1, 1, 1), 1, 2, 16, 8), ((9,), 3, 3, 8, 8)
    ]  # fmt: skip
    yield from cases_for_shapes(shapes, device, dtype, chunk=8)


ScanCaseShape = tuple[tuple[int, ...], int, int, int, int]
"""(tokens of each sequence, groups, heads, P, N)."""


def cases_for_shapes(
    shapes: Sequence[ScanCaseShape], device: str, dtype: torch.dtype, *, chunk: int
) -> Iterator[Case]:
    """Cases of these shapes, with chunks of so many tokens.

    Outputs, sums of N products C · B · x, are of the order of 1 for any N: of larger ones that
    cancel out, the difference from the reference would be float32's own.
    """
    for number, (lengths, groups, heads, dim, size) in enumerate(shapes):
        args, moved = random_recurrence_case_args(
            number, lengths, (heads, dim, size), device, dtype, chunk
        )
        width = heads * dim + 2 * groups * size
        x = randn(
            sum(lengths), width, device=device, dtype=dtype, seed=number, scale=size ** (-1 / 6)
        )
        dt = randn(len(x), heads, device=device, dtype=torch.float32, seed=number + 1)
        skip = randn(heads, device=device, dtype=dtype, seed=number + 4)
        args |= {"xbc": x, "dt": dt, "skip": skip, "dt_limit": (0.0, float("inf"))}
        name = f"{format_case_lengths(lengths)}x{groups}/{heads}x{dim}x{size}"
        yield Case(name, args, moved + nbytes(x) + 4 * len(x) * heads * dim, writes=("state",))
