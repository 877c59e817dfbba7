"""Modules with a part for each head, of which a rank keeps some."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from modelmill.nn.layer_spec import LinearSpec, ModuleSpec, Part, SiteSpec
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


class HeadRecurrenceSpec(ABC):
    """What the specs of mixers with a state of each head have in common.

    The last modules are a norm gated by z, and the output projection.

    Attributes:
        hidden: Channels of the layer.
        heads: Heads, each with a state.
    """

    hidden: int
    heads: int

    @property
    @abstractmethod
    def state(self) -> StateSpec:
        """The state of all heads, [heads, …], in float32 whatever the activations are."""

    @property
    def site_specs(self) -> tuple[SiteSpec, ...]:
        """The inputs of the two projections; no rows produce the second linearly."""
        return SiteSpec("qkv"), SiteSpec("o")

    def output_specs(
        self, scanned: str, projected: str, tensors: tuple[str, ...] = ("weight",)
    ) -> tuple[ModuleSpec, ModuleSpec]:
        """The last modules, (scanned, projected) → "attn_out"; tensors: of the projection."""
        norm = ModuleSpec(
            path="attn.gated_norm", reads=(scanned, projected), writes=("gated",),
            reference=("gated_norm",), arithmetic="norm", tensors=("weight",), op="rms_norm",
        )  # fmt: skip
        projection = LinearSpec(
            path="attn.out_proj", reads=("gated",), writes=("attn_out",), site="o",
            parts=(Part("o_proj", self.hidden),), split_columns="state_heads", tensors=tensors,
        )  # fmt: skip
        return norm, projection


class HeadRecurrence(RankHeads):
    """A recurrence with a state of each head.

    Attributes:
        state_index: The place of its state among those of the model.
    """

    def __init__(self, spec: HeadRecurrenceSpec, state_index: int) -> None:
        super().__init__(spec.heads)
        self._whole_state = spec.state
        self.state_index = state_index

    @property
    def state_spec(self) -> StateSpec:
        """The state of this rank's heads."""
        whole, (first, end) = self._whole_state, self.heads
        return StateSpec(whole.name, (end - first, *whole.shape[1:]), whole.dtype)
