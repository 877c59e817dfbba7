"""Advances states by a step's tokens: one token of each sequence, or parts of several.

What one token and a chunk of tokens do is the op's own (``gated_delta_rule``, ``ssd_scan``).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from modelmill.ops.case import randn
from modelmill.ops.recurrent_metadata import (
    RecurrentStepMetadata,
    gather_states,
    random_recurrent_metadata,
    store_snapshots,
)

Tokens = tuple[torch.Tensor, ...]
"""What an op needs of its tokens, each [T, …]."""
RecurrentStepFunction = Callable[[torch.Tensor, Tokens], tuple[torch.Tensor, torch.Tensor]]
"""(states [B, …], B tokens) → outputs [B, …] and the states behind them."""
ChunksFunction = Callable[[torch.Tensor, Tokens, int], tuple[torch.Tensor, torch.Tensor]]
"""(state, whole chunks of one sequence, their tokens) → outputs and the last state."""


def slice_tokens(tokens: Tokens, start: int, stop: int) -> Tokens:
    """The tokens [start, stop)."""
    return tuple(each[start:stop] for each in tokens)


def expand_groups_to_heads(x: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """[T, groups·size] → [T, heads, size]: consecutive heads share the vector of their group."""
    groups = x.unflatten(1, (-1, size))
    return groups.repeat_interleave(heads // groups.shape[1], 1)


def advance_states(
    state: torch.Tensor,
    rows: RecurrentStepMetadata,
    tokens: Tokens,
    out: torch.Tensor,
    *,
    step: RecurrentStepFunction,
    chunks: ChunksFunction,
) -> torch.Tensor:
    """Advance the states of a step's sequences and fill in the outputs.

    Whole chunks at multiples of ``rows.chunk`` are computed at once, all other tokens one by one.

    Args:
        state: [slots, …], written in place.
        rows: the sequences.
        tokens: all of them.
        out: [T, …] of zeros, for the outputs.
        step: computes one token of each sequence.
        chunks: computes whole chunks of one sequence.
    """
    if rows.is_decode:
        before = gather_states(state, rows)
        store_snapshots(state, before, rows.positions, rows)
        out, after = step(before, tokens)
        state[rows.slots] = after
        store_snapshots(state, after, rows.positions + 1, rows)
        return out
    for seq in rows.sequences():
        s = seq.initial_state(state)
        for start, stop in seq.whole_and_partial_chunk_ranges(rows.chunk):
            if seq.is_snapshot_position(start):
                state[seq.snapshot_slot] = s
            part = slice_tokens(tokens, start, stop)
            if rows.chunk > 1 and seq.has_only_whole_chunks((start, stop), rows.chunk):
                out[start:stop], s = chunks(s, part, rows.chunk)
            else:
                out[start:stop], s = sequential_scan(s, part, step)
        if seq.is_snapshot_position(seq.stop):
            state[seq.snapshot_slot] = s
        state[seq.slot] = s
    return out


def sequential_scan(
    s: torch.Tensor, tokens: Tokens, step: RecurrentStepFunction
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of one sequence one after another: outputs [n, …] and the last state."""
    outputs, batch = [], s[None]
    for t in range(len(tokens[0])):
        row, batch = step(batch, slice_tokens(tokens, t, t + 1))
        outputs.append(row)
    return torch.cat(outputs), batch[0]


def random_recurrence_case_args(
    number: int,
    lengths: tuple[int, ...],
    state_shape: tuple[int, int, int],
    device: str,
    dtype: torch.dtype,
    chunk: int,
) -> tuple[dict[str, Any], int]:
    """The arguments that ops on states share, of a case of that number, and the bytes of states."""
    rows, slots = random_recurrent_metadata(lengths, number, device, chunk)
    heads = state_shape[0]
    args = {
        "a_log": randn(heads, device=device, dtype=dtype, seed=number + 2),
        "dt_bias": randn(heads, device=device, dtype=dtype, seed=number + 3),
        "state": randn(slots, *state_shape, device=device, dtype=torch.float32, seed=number),
        "rows": rows,
    }
    return args, 2 * len(lengths) * prod(state_shape) * 4
