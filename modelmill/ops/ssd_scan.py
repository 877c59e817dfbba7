"""The state space recurrence of Mamba2 (arXiv:2405.21060), token by token and in chunks.

Each head keeps a matrix S [P, N]. With Δ = softplus(dt + dt_bias), within limits, and a scalar A:

    S ← exp(−exp(A_log) Δ) S + Δ x Bᵀ,    y = S C + D x

A chunk of C tokens at once is the state space duality (section 6): with G the running sum of the
log decays, y_i = Σ_{j ≤ i} exp(G_i − G_j) Δ_j (C_i · B_j) x_j + exp(G_i) S C_i.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.recurrence import advance_states, by_chunk
from modelmill.ops.state_rows import StateRows, random_state_rows

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
    rows: StateRows


class ScanTokens(NamedTuple):
    """Tokens: x [n, H, P], B, C [n, H, N] float32; log decay and Δ [n, H] float64."""

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    log_decay: torch.Tensor
    delta: torch.Tensor


DECLARATION = OpDeclaration(inputs=SSDScanInputs)


def ssd_scan(inputs: SSDScanInputs) -> torch.Tensor:
    """Advance the states by the step's tokens; returns y [T, H·P] float32."""
    tokens = _prepare(inputs)
    out = torch.zeros_like(tokens.x)
    out = advance_states(
        inputs.state, inputs.rows, tokens, out, step=recurrent_step, chunks=chunked
    )
    return (out + inputs.skip.to(tokens.x.dtype)[:, None] * tokens.x).flatten(1)


def _prepare(inputs: SSDScanInputs) -> ScanTokens:
    """Heads and steps of all tokens."""
    heads, dim, size = inputs.state.shape[1:]
    values = inputs.xbc.to(inputs.state.dtype)
    shared = (values.shape[1] - heads * dim) // 2
    x, b, c = values.split([heads * dim, shared, shared], 1)
    group = heads * size // shared
    b, c = (each.unflatten(1, (-1, size)).repeat_interleave(group, 1) for each in (b, c))
    delta = F.softplus(inputs.dt.double() + inputs.dt_bias.double()).clamp(*inputs.dt_limit)
    log_decay = -inputs.a_log.double().exp() * delta
    return ScanTokens(x.unflatten(1, (heads, dim)), b, c, log_decay, delta)


def recurrent_step(s: torch.Tensor, tokens: ScanTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of B sequences: outputs without D x [B, H, P], and the states behind."""
    x, b, c, log_decay, delta = tokens
    s = s * log_decay.exp().to(s.dtype)[..., None, None]
    s = s + (x * delta.to(s.dtype)[..., None])[..., None] * b[..., None, :]
    return (s * c[..., None, :]).sum(-1), s


def chunked(s: torch.Tensor, tokens: ScanTokens, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole chunks of one sequence: outputs without D x [n, H, P], and the last state."""
    x, b, c, log_decay, delta = by_chunk(tokens, chunk)
    total = log_decay.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=s.device).tril()
    between = total[..., :, None] - total[..., None, :]
    decay = between.masked_fill(~lower, float("-inf")).exp().to(s.dtype)
    x = x * delta.to(s.dtype)[..., None]
    inside = (c @ b.transpose(-1, -2) * decay) @ x
    c = c * total.exp().to(s.dtype)[..., None]
    written = (x * (total[..., -1:] - total).exp().to(s.dtype)[..., None]).transpose(-1, -2) @ b
    chunk_decay = total[..., -1].exp().to(s.dtype)[..., None, None]
    out = torch.empty_like(x)
    for n in range(len(out)):
        out[n] = inside[n] + c[n] @ s.transpose(-1, -2)
        s = s * chunk_decay[n] + written[n]
    return out.transpose(1, 2).flatten(0, 1), s


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Prompts beside decodes and decodes alone; B and C shared by all heads, or by some."""
    for number, (lengths, groups, heads, dim, size) in enumerate(
        (((5, 1, 11), 2, 4, 8, 16), ((1, 1, 1), 1, 2, 16, 8), ((9,), 3, 3, 8, 8))
    ):
        rows, slots = random_state_rows(lengths, number, device)
        count = sum(lengths)
        width = heads * dim + 2 * groups * size
        x = randn(count, width, device=device, dtype=dtype, seed=number)
        args = {
            "xbc": x,
            "dt": randn(count, heads, device=device, dtype=torch.float32, seed=number + 1),
            "a_log": randn(heads, device=device, dtype=dtype, seed=number + 2),
            "dt_bias": randn(heads, device=device, dtype=dtype, seed=number + 3),
            "skip": randn(heads, device=device, dtype=dtype, seed=number + 4),
            "dt_limit": (0.0, float("inf")),
            "state": randn(slots, heads, dim, size, device=device, dtype=torch.float32, seed=2),
            "rows": rows,
        }
        moved = 2 * count * heads * dim * size * 4 + nbytes(x)
        yield Case(f"{lengths}x{groups}/{heads}x{dim}x{size}", args, moved, writes=("state",))
