"""Which recurrent state each sequence of a step reads and writes, for the ops that advance one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

MAX_CHUNK = 64
"""Most tokens that the chunked forms of a recurrence take at once."""


class RecurrentStepMetadata(NamedTuple):
    """The sequences of a step and their slots of recurrent state.

    A state cache is [slots, …]; its last slot is padding. A sequence whose first position is 0
    starts from zeros, whatever its slot holds, so slots are never cleared.

    Attributes:
        query_start: [B + 1] int32, the first token of each sequence.
        positions: [T] int64.
        slots: [B] int64: the state that a sequence reads, and writes behind its last token.
        snapshot_slots: [B] int64: where a copy is kept; the padding slot where none is.
        snapshot_ends: [B] int64: the copy is the state behind so many tokens of the sequence,
            between its first position and its last + 1; −1 where none is kept.
        max_query: Most tokens of a sequence in this step; 1: token i belongs to sequence i.
        chunk: Chunked forms take this many tokens, from multiples of it on; the tokens outside of
            whole chunks are computed one by one. So results do not depend on how steps divide a
            sequence at multiples of it.
    """

    query_start: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    snapshot_slots: torch.Tensor
    snapshot_ends: torch.Tensor
    max_query: int
    chunk: int

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one token."""
        return self.max_query == 1 and len(self.slots) == len(self.positions)

    def sequences(self) -> Iterator[RecurrentSequence]:
        """Each sequence with tokens; reads the integers on the host."""
        starts, slots = self.query_start.tolist(), self.slots.tolist()
        snapshots, ends = self.snapshot_slots.tolist(), self.snapshot_ends.tolist()
        for index, slot in enumerate(slots):
            start, stop = starts[index], starts[index + 1]
            if stop > start:
                first = int(self.positions[start])
                yield RecurrentSequence(start, stop, first, slot, snapshots[index], ends[index])


class RecurrentSequence(NamedTuple):
    """One sequence of a step: its tokens [start, stop) and the position of the first."""

    start: int
    stop: int
    first: int
    slot: int
    snapshot_slot: int
    snapshot_end: int

    def initial_state(self, state: torch.Tensor) -> torch.Tensor:
        """The state in front of the first token, of a cache [slots, …]; a copy."""
        if self.first == 0:
            return torch.zeros(state.shape[1:], dtype=state.dtype, device=state.device)
        return state[self.slot].clone()

    def whole_and_partial_chunk_ranges(self, chunk: int) -> Iterator[tuple[int, int]]:
        """Consecutive parts (start, stop) of the tokens: whole chunks, and what is around them.

        Of whole chunks that follow each other one part is made; the snapshot ends a part.
        """
        offset = self.first - self.start
        edges = [-(-self.first // chunk) * chunk, (self.stop + offset) // chunk * chunk]
        edges = [edge - offset for edge in edges if edges[0] < edges[1]]
        edges += [self.snapshot_end - offset]
        inside = sorted({edge for edge in edges if self.start < edge < self.stop})
        bounds = [self.start, *inside, self.stop]
        yield from pairwise(bounds)

    def has_only_whole_chunks(self, part: tuple[int, int], chunk: int) -> bool:
        """Whether a part consists of whole chunks."""
        start, stop = part
        return (start - self.start + self.first) % chunk == 0 and (stop - start) % chunk == 0

    def is_snapshot_position(self, token: int) -> bool:
        """Whether the state in front of a token of the step is kept."""
        return token - self.start + self.first == self.snapshot_end


def chunk_size_for_page(page_size: int) -> int:
    """The chunk for pages of this size: the largest power of two that divides it."""
    return min(page_size & -page_size, MAX_CHUNK)


def gather_states(state: torch.Tensor, rows: RecurrentStepMetadata) -> torch.Tensor:
    """Of a decode step, the state in front of each token, [B, …]; a copy."""
    before = state[rows.slots]
    fresh = (rows.positions == 0).view(-1, *[1] * (before.dim() - 1))
    return before.masked_fill_(fresh, 0)


def store_snapshots(
    state: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, rows: RecurrentStepMetadata
) -> None:
    """Of a decode step, copy the states [B, …] behind ``ends`` [B] tokens that are kept.

    The others go to the padding slot: a CUDA graph has no branches.
    """
    chosen = rows.snapshot_ends == ends
    if state.device.type == "cpu" and not bool(chosen.any()):
        return
    padding = torch.full_like(rows.snapshot_slots, len(state) - 1)
    state[torch.where(chosen, rows.snapshot_slots, padding)] = values


def random_recurrent_metadata(
    lengths: tuple[int, ...], seed: int, device: str, chunk: int = 8
) -> tuple[RecurrentStepMetadata, int]:
    """Sequences of these lengths for a case, the first a new one, and the number of slots."""
    draw = torch.Generator().manual_seed(seed)
    count = len(lengths)
    firsts = [0 if i == 0 else int(torch.randint(1, 40, (), generator=draw)) for i in range(count)]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    places = [torch.arange(a, a + n) for a, n in zip(firsts, lengths, strict=True)]
    padding = 2 * count
    snapshots = torch.full((count,), padding)
    ends = torch.full((count,), -1)
    last = firsts[-1] + lengths[-1]
    if last // chunk * chunk >= firsts[-1]:
        snapshots[-1], ends[-1] = count, last // chunk * chunk
    rows = RecurrentStepMetadata(
        starts.to(device), torch.cat(places).to(device),
        torch.randperm(count, generator=draw).to(device), snapshots.to(device), ends.to(device),
        max(lengths), chunk,
    )  # fmt: skip
    return rows, padding + 1


def format_case_lengths(lengths: tuple[int, ...]) -> str:
    """The tokens of each sequence in a case's name, "decode-64" where each has one of many."""
    return f"decode-{len(lengths)}" if set(lengths) == {1} else str(lengths)


def has_contiguous_operands(tokens: torch.Tensor, gates: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether a token's channels, the gates and a slot's state each lie together.

    Args:
        tokens: [T, channels].
        gates: [T, values per head].
        state: [slots, H, rows, columns]; must be float32.
    """
    _, _, rows, columns = state.shape
    return (
        tokens.stride(1) == 1
        and gates.is_contiguous()
        and state.dtype is torch.float32
        and state.stride()[1:] == (rows * columns, columns, 1)
    )
