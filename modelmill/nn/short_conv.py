"""A gated short convolution in the place of attention (LFM2, arXiv:2511.23404, section 2.1).

in_proj → B | C | x; out_proj(C · convolution(B · x)). Its state is the last values of B · x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from modelmill.nn.causal_conv import CausalConv, CausalConvConfig
from modelmill.nn.layer_spec import (
    LinearRowBlock,
    LinearSpec,
    ModuleSpec,
    QuantSiteSpec,
    linear_tensor_names,
)
from modelmill.nn.linear import Linear
from modelmill.nn.partition import StateHeadPartition
from modelmill.nn.step import Step
from modelmill.parallel.shard import Range

CHANNEL_SPLIT_AXIS_NAME = "state_heads"
"""How ranks divide the channels: as heads of one channel each."""


@dataclass(frozen=True)
class ShortConvSpec:
    """Sizes of one layer's convolution; takes the place of an ``AttentionSpec``.

    Attributes:
        hidden: Channels of the layer, and of the convolution.
        width: Tokens that an output reads.
        bias: Of the projections and of the convolution.
    """

    hidden: int
    width: int
    bias: bool = False

    @property
    def conv_config(self) -> CausalConvConfig:
        """The convolution."""
        return CausalConvConfig(self.hidden, self.width, self.bias, silu=False)

    @property
    def partition(self) -> StateHeadPartition:
        """How ranks divide the channels."""
        return StateHeadPartition("attn", self.hidden, self.hidden, 1, 1)

    @property
    def quant_sites(self) -> tuple[QuantSiteSpec, ...]:
        """The inputs of the two projections; no rows produce the second linearly."""
        return QuantSiteSpec("qkv"), QuantSiteSpec("o")

    def build_module(self, state_index: int) -> ShortConv:
        """The module; ``state_index``: the place of its state among those of the model."""
        return ShortConv(self, state_index)

    def row_reorder_steps(self, *, by_key_head: bool = False) -> dict[str, str]:
        """Rename steps that make the modules' rows from a checkpoint's."""
        assert not by_key_head, "rows are stored part by part"
        return {"attn.conv": "depthwise"}

    def module_specs(self) -> tuple[ModuleSpec, ...]:
        """The modules as a layer's ``attn``; "attn_input" → "attn_out"."""
        tensors = linear_tensor_names(self.bias)
        return (
            LinearSpec(
                path="attn.in_proj", reads=("attn_input",), writes=("bcx",), site="qkv",
                parts=tuple(LinearRowBlock(name, self.hidden, CHANNEL_SPLIT_AXIS_NAME)
                            for name in ("B", "C", "x")),
                tensors=tensors,
            ),
            ModuleSpec(
                path="attn.conv_input", reads=("bcx",), writes=("conv_input",),
                reference=("conv_input",), op="mul",
            ),
            self.conv_config.make_module_spec("attn.conv", "conv_input", "mixed"),
            ModuleSpec(
                path="attn.conv_output", reads=("mixed", "bcx"), writes=("gated",),
                reference=("conv_output",), op="mul",
            ),
            LinearSpec(
                path="attn.out_proj", reads=("gated",), writes=("attn_out",), site="o",
                parts=(LinearRowBlock("o_proj", self.hidden),),
                split_columns=CHANNEL_SPLIT_AXIS_NAME,
                tensors=tensors,
            ),
        )  # fmt: skip


class ConvInputGate(nn.Module):
    """B · x."""

    def forward(self, bcx: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, B | C | x] → [T, channels]."""
        b, _, x = bcx.chunk(3, 1)
        return b * x


class ConvOutputGate(nn.Module):
    """C · the convolution's output."""

    def forward(self, mixed: torch.Tensor, bcx: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, channels], [T, B | C | x] → [T, channels]."""
        return bcx.chunk(3, 1)[1] * mixed


class ShortConv(nn.Module):
    """The mixer of one layer."""

    def __init__(self, spec: ShortConvSpec, state_index: int) -> None:
        super().__init__()
        self.kv_heads = spec.hidden
        self.in_proj = Linear(spec.hidden, 3 * spec.hidden, spec.bias)
        self.conv_input = ConvInputGate()
        self.conv = CausalConv(spec.conv_config, state_index)
        self.conv_output = ConvOutputGate()
        self.out_proj = Linear(spec.hidden, spec.hidden, spec.bias)

    def forward(self, x: torch.Tensor, rope: object, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, H] → [T, H]."""
        bcx = self.in_proj(x, step)
        mixed = self.conv(self.conv_input(bcx, step), step)
        return self.out_proj(self.conv_output(mixed, bcx, step), step)

    def keep_local_heads(self, heads: Range, kv_heads: Range) -> None:
        """Keep a rank's channels."""
        self.kv_heads = kv_heads[1] - kv_heads[0]
        self.conv.keep_local_channels(heads)
