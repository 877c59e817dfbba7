"""Modules with a part for each head, of which a rank keeps some."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from modelmill.nn.recurrent_state import StateSpec
from modelmill.parallel.shard import Range


class RankHeads(nn.Module):
    """A module whose tensors have all heads, and which computes those of its rank."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads: Range = (0, heads)

    def take_heads(self, heads: Range) -> None:
        """Keep a rank's heads."""
        self.heads = heads


class HasState(Protocol):
    """The spec of a mixer with a state of each head."""

    @property
    def heads(self) -> int:
        """How many there are."""

    @property
    def state(self) -> StateSpec:
        """The state of all heads, [heads, …]."""


class HeadRecurrence(RankHeads):
    """A recurrence with a state of each head.

    Attributes:
        state_index: The place of its state among those of the model.
    """

    def __init__(self, spec: HasState, state_index: int) -> None:
        super().__init__(spec.heads)
        self._whole_state = spec.state
        self.state_index = state_index

    @property
    def state_spec(self) -> StateSpec:
        """The state of this rank's heads."""
        whole, (first, end) = self._whole_state, self.heads
        return StateSpec(whole.name, (end - first, *whole.shape[1:]), whole.dtype)
