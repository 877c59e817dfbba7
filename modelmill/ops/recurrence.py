"""Advances states by a step's tokens: one token of each sequence, or parts of several.

What one token and a chunk of tokens do is the op's own (``gated_delta_rule``, ``ssd_scan``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.state_rows import StateRows, fresh_states, keep_snapshots

Step = Callable[[torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]
"""(states [B, …], B tokens) → outputs [B, …] and the states behind them."""
Chunks = Callable[[torch.Tensor, Any, int], tuple[torch.Tensor, torch.Tensor]]
"""(state, whole chunks of one sequence, their tokens) → outputs and the last state."""


def part_of(tokens: Any, start: int, stop: int) -> Any:
    """The tokens [start, stop) of a NamedTuple of tensors [T, …]."""
    return type(tokens)(*(each[start:stop] for each in tokens))


def by_chunk(tokens: Any, chunk: int) -> list[torch.Tensor]:
    """The tensors of whole chunks, [n, H, …] → [N, H, C, …]."""
    return [each.unflatten(0, (-1, chunk)).transpose(1, 2).contiguous() for each in tokens]


def advance_states(
    state: torch.Tensor,
    rows: StateRows,
    tokens: Any,
    out: torch.Tensor,
    *,
    step: Step,
    chunks: Chunks,
) -> torch.Tensor:
    """Advance the states of a step's sequences and fill in the outputs.

    Whole chunks at multiples of ``rows.chunk`` are computed at once, all other tokens one by one.

    Args:
        state: [slots, …], written in place.
        rows: the sequences.
        tokens: a NamedTuple of tensors [T, …].
        out: [T, …] of zeros, for the outputs.
        step: computes one token of each sequence.
        chunks: computes whole chunks of one sequence.
    """
    if rows.is_decode:
        before = fresh_states(state, rows)
        keep_snapshots(state, before, rows.positions, rows)
        out, after = step(before, tokens)
        state[rows.slots] = after
        keep_snapshots(state, after, rows.positions + 1, rows)
        return out
    for seq in rows.sequences():
        s = seq.initial(state)
        for start, stop in seq.parts(rows.chunk):
            if seq.is_snapshot(start):
                state[seq.snapshot_slot] = s
            part = part_of(tokens, start, stop)
            if rows.chunk > 1 and seq.is_whole((start, stop), rows.chunk):
                out[start:stop], s = chunks(s, part, rows.chunk)
            else:
                out[start:stop], s = sequential(s, part, step)
        if seq.is_snapshot(seq.stop):
            state[seq.snapshot_slot] = s
        state[seq.slot] = s
    return out


def sequential(s: torch.Tensor, tokens: Any, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of one sequence one after another: outputs [n, …] and the last state."""
    outputs, batch = [], s[None]
    for t in range(len(tokens[0])):
        row, batch = step(batch, part_of(tokens, t, t + 1))
        outputs.append(row)
    return torch.cat(outputs), batch[0]
