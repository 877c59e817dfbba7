"""Modules with a part for each head, of which a rank keeps some."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from modelmill.nn.causal_conv import CausalConvConfig, select_row_ranges
from modelmill.nn.layer_spec import LinearRowBlock, LinearSpec, ModuleSpec, QuantSiteSpec
from modelmill.nn.partition import StateHeadPartition
from modelmill.nn.recurrent_state import StateSpec
from modelmill.nn.step import Step
from modelmill.ops.recurrent_metadata import RecurrentStepMetadata
from modelmill.parallel.shard import Range


class HeadSelectingModule(nn.Module):
    """A module whose tensors have all heads, and which computes those of its rank."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads: Range = (0, heads)

    def keep_local_heads(self, heads: Range) -> None:
        """Keep a rank's heads."""
        self.heads = heads

    def select_local_heads(self, values: torch.Tensor) -> torch.Tensor:
        """The values of this rank's heads, of those of all heads [heads, …]."""
        return select_row_ranges(values, (self.heads,))


class HeadRecurrenceSpec(ABC):
    """What the specs of mixers with a state of each head have in common.

    The last modules are a norm gated by z, and the output projection.

    Attributes:
        hidden: Channels of the layer.
        heads: Heads, each with a state.
        conv_width: Tokens that the convolution reads.
        conv_bias: Whether it has a bias.
        state_name: Of the heads' state.
        keys_first: Whether a head's state is [key_dim, head_dim], not [head_dim, key_dim].
    """

    hidden: int
    heads: int
    conv_width: int
    conv_bias: bool = False
    state_name: ClassVar[str]
    keys_first: ClassVar[bool] = False

    @property
    @abstractmethod
    def partition(self) -> StateHeadPartition:
        """How ranks divide the heads."""

    @property
    def width(self) -> int:
        """Channels of all heads: of x and z, or of values."""
        return self.partition.heads * self.partition.head_dim

    @property
    def shared_width(self) -> int:
        """Channels of what several heads share: of B and of C, or of keys and of queries."""
        return self.partition.key_heads * self.partition.key_dim

    @property
    def conv_config(self) -> CausalConvConfig:
        """The convolution of the channels of all heads and of both shared ones."""
        return CausalConvConfig(self.width + 2 * self.shared_width, self.conv_width, self.conv_bias)

    @property
    def state_spec(self) -> StateSpec:
        """The state of all heads, [heads, …], in float32 whatever the activations are."""
        divided = self.partition
        keys, values = divided.key_dim, divided.head_dim
        shape = (keys, values) if self.keys_first else (values, keys)
        return StateSpec(self.state_name, (divided.heads, *shape), torch.float32)

    @property
    def quant_sites(self) -> tuple[QuantSiteSpec, ...]:
        """The inputs of the two projections; no rows produce the second linearly."""
        return QuantSiteSpec("qkv"), QuantSiteSpec("o")

    def output_module_specs(
        self, scanned: str, projected: str, tensors: tuple[str, ...] = ("weight",)
    ) -> tuple[ModuleSpec, ModuleSpec]:
        """The last modules, (scanned, projected) → "attn_out"; tensors: of the projection."""
        norm = ModuleSpec(
            path="attn.gated_norm", reads=(scanned, projected), writes=("gated",),
            reference=("gated_norm",), arithmetic="norm", tensors=("weight",), op="gated_rms_norm",
        )  # fmt: skip
        projection = LinearSpec(
            path="attn.out_proj", reads=("gated",), writes=("attn_out",), site="o",
            parts=(LinearRowBlock("o_proj", self.hidden),), split_columns="state_heads",
            tensors=tensors,
        )  # fmt: skip
        return norm, projection


class PerHeadProjection(HeadSelectingModule):
    """x Wᵀ + b in float32: [T, H] → [T, parts·heads]. The matrix is small and never quantized.

    Its rows are those of all heads, once for each part.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, hidden: int, heads: int, parts: int = 1, *, bias: bool = False) -> None:
        super().__init__(heads)
        rows = parts * heads
        self.parts = parts
        self.register_buffer("weight", torch.empty(rows, hidden, device="meta"))
        self.register_buffer("bias", torch.empty(rows, device="meta") if bias else None)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The values of this rank's heads."""
        whole, (first, end) = len(self.weight) // self.parts, self.heads
        rows = tuple((part * whole + first, part * whole + end) for part in range(self.parts))
        weight = select_row_ranges(self.weight, rows)
        if weight is self.weight:
            out = step.ops.head_projection(x, weight)
        else:  # copied just now: the op's kernels read a weight before earlier kernels have ended
            out = x.float() @ weight.float().T
        return out if self.bias is None else out + select_row_ranges(self.bias, rows).float()


class PerHeadRecurrence(HeadSelectingModule):
    """A recurrence with a state of each head, whose decay is exp(−exp(A_log) · …).

    Attributes:
        A_log: [heads].
        dt_bias: [heads], added before the softplus of the decay's factor.
        state_index: The place of its state among those of the model.
    """

    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def __init__(self, spec: HeadRecurrenceSpec, state_index: int) -> None:
        super().__init__(spec.heads)
        self.register_buffer("A_log", torch.empty(spec.heads, device="meta"))
        self.register_buffer("dt_bias", torch.empty(spec.heads, device="meta"))
        self._whole_state = spec.state_spec
        self.state_index = state_index

    @property
    def state_spec(self) -> StateSpec:
        """The state of this rank's heads."""
        whole, (first, end) = self._whole_state, self.heads
        return StateSpec(whole.name, (end - first, *whole.shape[1:]), whole.dtype)

    def layer_states_and_step_metadata(
        self, step: Step
    ) -> tuple[torch.Tensor, RecurrentStepMetadata]:
        """The states of all slots, and the step's sequences."""
        assert step.state is not None, "a step of a model with recurrent state"
        return step.state.cache.states[self.state_index], step.state.rows
