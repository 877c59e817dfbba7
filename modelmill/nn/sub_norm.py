"""RMSNorm in front of a branch's last product (arXiv:2210.06423, section 3.1; BitNet b1.58)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from modelmill.nn.layer_spec import LinearSpec, ModuleSpec, NormSpec
from modelmill.nn.linear import Linear
from modelmill.nn.mlp import GatedMLP, MLPSpec
from modelmill.nn.partition import NormedChannelPartition
from modelmill.nn.step import Step
from modelmill.ops.bound_op import CachedOpBinding
from modelmill.parallel.shard import Range


class SubNorm(nn.Module):
    """RMSNorm over all channels; ranks that have a part of them add up their squares.

    The weight has the values of all channels, also on a rank that computes some of them.
    """

    weight: torch.Tensor

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps, self.total = eps, channels
        self.channels: Range = (0, channels)
        self.register_buffer("weight", torch.empty(channels, device="meta"))
        self._op = CachedOpBinding()

    def keep_local_channels(self, channels: Range) -> None:
        """Keep a rank's channels."""
        self.channels = channels

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, channels] → the same shape."""
        if step.tp_group.size == 1:
            return self._op(step.ops.rms_norm, x.contiguous(), self.weight, self.eps)
        wide, (first, end) = x.float(), self.channels
        sums = wide.square().sum(-1, keepdim=True)
        sums = step.tp_group.all_reduce(sums, captured=step.is_graph_capturable)
        normed = wide * torch.rsqrt(sums / self.total + self.eps)
        return normed.to(x.dtype) * self.weight[first:end]


def sub_norm_spec(path: str, reads: str, reference: str) -> NormSpec:
    """What a layer declares of it; it writes its input's name with ``_normed``."""
    return NormSpec(
        path=path, reads=(reads,), writes=(f"{reads}_normed",), reference=(reference,),
        op="rms_norm",
    )  # fmt: skip


@dataclass(frozen=True)
class NormedMLPSpec(MLPSpec):
    """A gated MLP with such a norm.

    Attributes:
        eps: Of the norm.
    """

    eps: float = 1e-6

    @property
    def partitions(self) -> tuple[NormedChannelPartition, ...]:
        """How ranks divide the inner channels."""
        return (NormedChannelPartition("inner", self.inner, "mlp.norm"),)

    def build_module(self) -> NormedGatedMLP:
        """The module."""
        return NormedGatedMLP(self)

    def module_specs(self, reads: str = "mlp_input", site: str = "up") -> tuple[ModuleSpec, ...]:
        """The modules of a layer's ``mlp``, ``reads`` → "mlp_out"."""
        first, activation, down = super().module_specs(reads, site)
        norm = sub_norm_spec("mlp.norm", "act", "mlp_sub_norm")
        assert isinstance(down, LinearSpec), "the second product"
        return first, activation, norm, replace(down, reads=norm.writes)

    @property
    def is_linear_in_up(self) -> bool:
        """Whether the second product's input is linear in up: the norm is in between."""
        return False


class NormedGatedMLP(GatedMLP):
    """down(norm(activation(gate(x)) · up(x)))."""

    down_proj: Linear

    def __init__(self, spec: NormedMLPSpec) -> None:
        super().__init__(spec.hidden, spec.inner, spec.bias, spec.activation)
        self.norm = SubNorm(spec.inner, spec.eps)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        inner = self.act(self.gate_up_proj(x, step), step)
        return self.down_proj(self.norm(inner, step), step)
