"""A short causal convolution over each sequence, whose state is the last inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from modelmill.nn.layer_spec import RecurrenceSpec
from modelmill.nn.recurrent_state import StateSpec
from modelmill.nn.step import Step
from modelmill.ops.causal_conv import CausalConvInputs
from modelmill.parallel.shard import Range


@dataclass(frozen=True)
class CausalConvConfig:
    """Sizes of a short convolution: channels, tokens that an output reads, a bias or none, SiLU."""

    channels: int
    width: int
    bias: bool = False
    silu: bool = True

    @property
    def state_spec(self) -> StateSpec:
        """The last inputs of a sequence, [width − 1, channels], oldest first."""
        return StateSpec("conv", (self.width - 1, self.channels))

    def make_module_spec(self, path: str, reads: str, writes: str) -> RecurrenceSpec:
        """What a layer declares of it."""
        return RecurrenceSpec(
            path=path,
            reads=(reads,),
            writes=(writes,),
            reference=("conv",),
            state=self.state_spec,
            state_reference="conv_state",
            tensors=("weight", "bias") if self.bias else ("weight",),
            op="causal_conv",
        )


class CausalConv(nn.Module):
    """The convolution of the first channels of [T, C'], and SiLU of it.

    The weight has all channels, also on a rank that computes some of them.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, config: CausalConvConfig, state_index: int) -> None:
        """Make the module; ``state_index``: its place among the states of the model."""
        super().__init__()
        self.config = config
        self.state_index = state_index
        self.channels: tuple[Range, ...] = ((0, config.channels),)
        size = config.channels, config.width
        self.register_buffer("weight", torch.empty(size, device="meta"))
        self.register_buffer(
            "bias", torch.empty(config.channels, device="meta") if config.bias else None
        )

    @property
    def state_spec(self) -> StateSpec:
        """The state of this rank's channels."""
        count = sum(end - first for first, end in self.channels)
        return StateSpec("conv", (self.config.width - 1, count))

    def keep_local_channels(self, *channels: Range) -> None:
        """Keep a rank's channels."""
        self.channels = channels

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, C'] → [T, C]."""
        assert step.state is not None, "a step of a model with recurrent state"
        bias = None if self.bias is None else self._select_local_channels(self.bias)
        state = step.state.cache.states[self.state_index]
        return step.ops.causal_conv(
            CausalConvInputs(
                x,
                state,
                self._select_local_channels(self.weight),
                bias,
                step.state.rows,
                self.config.silu,
            )
        )

    def _select_local_channels(self, values: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's channels."""
        return select_row_ranges(values, self.channels)


def select_row_ranges(values: torch.Tensor, ranges: tuple[Range, ...]) -> torch.Tensor:
    """The rows of a tensor in ascending ranges; the tensor itself where they are all of it."""
    if sum(end - first for first, end in ranges) == len(values):
        return values
    return torch.cat([values[first:end] for first, end in ranges])
