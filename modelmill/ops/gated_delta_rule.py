"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464), token by token and in chunks.

Each head keeps a matrix S [dk, dv] that maps keys to values. A token decays it and corrects what it
answers to the token's key by the rate β:

    S ← α S,    S ← S + k (β (v − Sᵀ k))ᵀ,    o = Sᵀ q / √dk

with q and k of length 1, α = exp(−exp(A_log) · softplus(a + dt_bias)) and β = sigmoid(b).

A chunk of C tokens at once is the same by the WY representation (arXiv:2406.06484, section 3.2;
with decay arXiv:2412.06464, section 3.3): with G the running sum of log α and Γ_ij = exp(G_i − G_j)
for i ≥ j, T = (I + strictly lower part of (β k kᵀ ⊙ Γ))⁻¹ gives the corrected values
U − W S = T β v − T β e^G k S, from which outputs and the next state are products of matrices.
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
L2_EPS = 1e-6  # of the lengths of q and k


class GatedDeltaInputs(NamedTuple):
    """The operands; H value heads, of which H / Hk consecutive ones share a key head.

    Attributes:
        qkv: [T, 2·Hk·dk + H·dv], q | k | v behind the convolution.
        gates: [T, 2·H] float32, b | a.
        a_log: [H].
        dt_bias: [H].
        state: [slots, H, dk, dv] float32, written in place.
        rows: the sequences of the step.
    """

    qkv: torch.Tensor
    gates: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    state: torch.Tensor
    rows: RecurrentStepMetadata


DECLARATION = OpDeclaration(
    inputs=GatedDeltaInputs, cost=partial(recurrence_cost, operations_per_state_value=6)
)


def gated_delta_rule(inputs: GatedDeltaInputs) -> torch.Tensor:
    """Advance the states by the step's tokens; returns o [T, H·dv] float32.

    Whole chunks at multiples of ``rows.chunk`` are computed at once, all other tokens one by one.
    """
    tokens = _prepare_tokens(inputs)
    out = torch.zeros_like(tokens.v)
    state, rows = inputs.state, inputs.rows
    return advance_states(
        state, rows, tokens, out, step=recurrent_step, chunks=compute_chunks
    ).flatten(1)


class DeltaTokens(NamedTuple):
    """q, k [T, H, dk], v [T, H, dv] float32; log α and β [T, H] float64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def _prepare_tokens(inputs: GatedDeltaInputs) -> DeltaTokens:
    heads, dk, dv = inputs.state.shape[1:]
    keys, v = inputs.qkv.to(inputs.state.dtype).tensor_split((-heads * dv,), 1)
    q, k = (_l2_normalize(expand_groups_to_heads(each, heads, dk)) for each in keys.chunk(2, 1))
    b, a = inputs.gates.double().chunk(2, 1)
    rate = inputs.a_log.double().exp()
    log_decay = -rate * F.softplus(a + inputs.dt_bias.double())
    v = v.unflatten(1, (heads, dv))
    return DeltaTokens(q=q * dk**-0.5, k=k, v=v, log_decay=log_decay, beta=b.sigmoid())


def _l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1 in the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def recurrent_step(s: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of B sequences.

    Args:
        s: [B, H, dk, dv], the states before.
        tokens: B of them.

    Returns:
        Outputs [B, H, dv] and the states behind the tokens.
    """
    q, k, v, log_decay, beta = tokens
    s = s * log_decay.exp().to(s.dtype)[..., None, None]
    answer = (s * k[..., None]).sum(-2)
    correction = (v - answer) * beta.to(s.dtype)[..., None]
    s = s + k[..., None] * correction[..., None, :]
    return (s * q[..., None]).sum(-2), s


def compute_chunks(
    s: torch.Tensor, tokens: Tokens, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole chunks of one sequence: outputs [n, H, dv] and the last state.

    The arithmetic of a chunk does not depend on the number of chunks.
    """
    q, k, v, log_decay, beta = split_into_chunks(tokens, chunk)
    decays = chunk_decays(log_decay, s.dtype)
    rate = beta.to(s.dtype)[..., None]
    system = (rate * k @ k.transpose(-1, -2) * decays.between).tril(-1)
    right = torch.cat((rate * v, rate * decays.since_start * k), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = q @ k.transpose(-1, -2) * decays.between
    q = q * decays.since_start
    k = (k * decays.to_end).transpose(-1, -2)
    out = torch.empty_like(v)
    for n in range(len(out)):
        corrected = values[n] - keys[n] @ s
        out[n] = q[n] @ s + scores[n] @ corrected
        s = s * decays.whole[n] + k[n] @ corrected
    return out.transpose(1, 2).flatten(0, 1), s


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Prompts beside decodes and decodes alone; shared key heads; keys shorter than values."""
    shapes: list[DeltaCaseShape] = [
        ((5, 1, 11), 2, 4, 8, 8), ((1, 1, 1), 2, 2, 16, 8), ((9,), 1, 3, 8, 16)
    ]  # fmt: skip
    yield from cases_for_shapes(shapes, device, dtype, chunk=8)


DeltaCaseShape = tuple[tuple[int, ...], int, int, int, int]
"""(tokens of each sequence, key heads, heads, dk, dv)."""


def cases_for_shapes(
    shapes: Sequence[DeltaCaseShape], device: str, dtype: torch.dtype, *, chunk: int
) -> Iterator[Case]:
    """Cases of these shapes, with chunks of so many tokens."""
    for number, (lengths, key_heads, heads, dk, dv) in enumerate(shapes):
        args, moved = random_recurrence_case_args(
            number, lengths, (heads, dk, dv), device, dtype, chunk
        )
        count = sum(lengths)
        width = 2 * key_heads * dk + heads * dv
        x = randn(count, width, device=device, dtype=dtype, seed=number)
        gates = randn(count, 2 * heads, device=device, dtype=torch.float32, seed=number + 1)
        args |= {"qkv": x, "gates": gates}
        name = f"{format_case_lengths(lengths)}x{key_heads}/{heads}x{dk}x{dv}"
        yield Case(name, args, moved + nbytes(x) + 4 * count * heads * dv, writes=("state",))
