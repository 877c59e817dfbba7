"""The recurrent state of sequences: what a layer keeps, and the cache that holds it in slots.

A layer without keys and values (Gated DeltaNet, Mamba2, a short convolution) keeps a state of fixed
size for each sequence. Its spec declares it (``layer_spec.RecurrenceSpec``). The cache is one
buffer with a *slot* for each row of the page tables, for each snapshot of the prefix cache, and
a last one for padding; a slot holds the states of all layers side by side, so that it is copied as
one block. The buffer is never reallocated: CUDA graphs address it by slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from modelmill.nn.kv import Zeros, lazily_backed_zeros
from modelmill.ops.recurrent_metadata import RecurrentStepMetadata

_STATE_ALIGNMENT_BYTES = 64  # bytes: each state starts at a cache line


@dataclass(frozen=True)
class StateSpec:
    """A state that a module keeps of each sequence.

    Attributes:
        name: The module's word for it.
        shape: Of one sequence.
        dtype: None: the activations' dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def nbytes(self, activation_dtype: torch.dtype) -> int:
        """Bytes of one sequence's state."""
        return math.prod(self.shape) * (self.dtype or activation_dtype).itemsize


@dataclass(frozen=True)
class ModelStateSpec:
    """What a model keeps of each sequence: the states of all its layers, in their order."""

    states: tuple[StateSpec, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is any state."""
        return bool(self.states)

    def offsets(self, activation_dtype: torch.dtype) -> list[int]:
        """The first byte of each state in a slot, and the bytes of a slot."""
        out = [0]
        for state in self.states:
            size = state.nbytes(activation_dtype)
            out.append(out[-1] + -(-size // _STATE_ALIGNMENT_BYTES) * _STATE_ALIGNMENT_BYTES)
        return out

    def slot_bytes(self, activation_dtype: torch.dtype) -> int:
        """Bytes of a sequence's state, over all layers."""
        return self.offsets(activation_dtype)[-1]


NO_STATE = ModelStateSpec()


@dataclass(frozen=True)
class RecurrentStateCache:
    """The states of all slots.

    Attributes:
        buffer: [slots, bytes] uint8.
        states: For each state of the shape, its view [slots, …].
    """

    buffer: torch.Tensor
    states: tuple[torch.Tensor, ...]

    @staticmethod
    def allocate(
        shape: ModelStateSpec,
        slots: int,
        dtype: torch.dtype,
        device: str,
        *,
        zeros: Zeros = lazily_backed_zeros,
    ) -> RecurrentStateCache:
        """Zeroed slots, of ``zeros``; in RAM they are backed once they are written."""
        offsets = shape.offsets(dtype)
        buffer = zeros((slots, offsets[-1]), torch.uint8, device)
        states = []
        for state, first in zip(shape.states, offsets, strict=False):
            part = buffer[:, first : first + state.nbytes(dtype)].view(state.dtype or dtype)
            states.append(part.unflatten(1, state.shape))
        return RecurrentStateCache(buffer, tuple(states))

    @staticmethod
    def allocate_shared_scratch(
        shape: ModelStateSpec, slots: int, dtype: torch.dtype, device: str
    ) -> RecurrentStateCache:
        """States that share one memory, for sequences that each layer computes whole."""
        size = max((state.nbytes(dtype) for state in shape.states), default=0)
        buffer = lazily_backed_zeros(
            (slots, -(-size // _STATE_ALIGNMENT_BYTES) * _STATE_ALIGNMENT_BYTES),
            torch.uint8,
            device,
        )
        states = tuple(
            buffer[:, : state.nbytes(dtype)].view(state.dtype or dtype).unflatten(1, state.shape)
            for state in shape.states
        )
        return RecurrentStateCache(buffer, states)

    @property
    def num_slots(self) -> int:
        """Number of slots, padding included."""
        return len(self.buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.buffer.numel()

    @contextmanager
    def restore_slots_on_exit(self, slots: torch.Tensor) -> Iterator[None]:
        """Within the block, slots may change; behind it they are as before."""
        before = self.buffer[slots]
        try:
            yield
        finally:
            self.buffer[slots] = before

    def copy_slots(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy slots (from, to), one after another."""
        for source, target in pairs:
            self.buffer[target].copy_(self.buffer[source])


@dataclass(frozen=True)
class StepRecurrentStates:
    """The states of a step: the cache, and which slots its sequences use."""

    cache: RecurrentStateCache
    rows: RecurrentStepMetadata

    def select_first_sequences(
        self, count: int, tokens: int, max_query: int
    ) -> StepRecurrentStates:
        """The states of the step's first sequences, which have ``tokens`` tokens."""
        rows = self.rows
        cut = RecurrentStepMetadata(
            rows.query_start[: count + 1], rows.positions[:tokens], rows.slots[:count],
            rows.snapshot_slots[:count], rows.snapshot_ends[:count], max_query, rows.chunk,
        )  # fmt: skip
        return StepRecurrentStates(self.cache, cut)


def make_standalone_step_states(
    shape: ModelStateSpec,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    dtype: torch.dtype,
    *,
    max_query: int,
    chunk: int,
    cache: RecurrentStateCache | None = None,
) -> StepRecurrentStates | None:
    """The states of a step without an engine, sequence i in slot i; None for a model without any.

    Args:
        shape: Of the model.
        query_start: As in Step; positions likewise.
        positions: As in Step.
        dtype: Of the activations.
        max_query: Most tokens of a sequence in the step.
        chunk: As in ``RecurrentStepMetadata``.
        cache: Of earlier steps of the sequences; None: a new one.
    """
    if not shape:
        return None
    device, count = positions.device, len(query_start) - 1
    if cache is None:
        cache = RecurrentStateCache.allocate(shape, count + 1, dtype, str(device))
    slots = torch.arange(count, device=device)
    padding = torch.full_like(slots, cache.num_slots - 1)
    rows = RecurrentStepMetadata(
        query_start, positions, slots, padding, torch.full_like(slots, -1), max_query, chunk
    )
    return StepRecurrentStates(cache, rows)
