"""Mamba2: a state space model with one decay per head and token (arXiv:2405.21060).

in_proj → short convolution of x, B and C → recurrence → gate z, then a norm of groups of channels
→ out_proj. The steps Δ come from rows of their own, which are never quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from modelmill.nn.causal_conv import CausalConv, select_row_ranges
from modelmill.nn.head_recurrence import (
    HeadRecurrenceSpec,
    HeadSelectingModule,
    PerHeadProjection,
    PerHeadRecurrence,
)
from modelmill.nn.layer_spec import (
    LinearRowBlock,
    LinearSpec,
    ModuleSpec,
    RecurrenceSpec,
    linear_tensor_names,
)
from modelmill.nn.linear import Linear
from modelmill.nn.partition import StateHeadPartition
from modelmill.nn.recurrent_mixer import RecurrentMixer
from modelmill.nn.step import Step
from modelmill.ops.causal_conv import batch_invariant_silu
from modelmill.ops.gated_rms_norm import GatedRMSNormInputs
from modelmill.ops.ssd_scan import SSDScanInputs
from modelmill.parallel.shard import Range


@dataclass(frozen=True)
class Mamba2Spec(HeadRecurrenceSpec):
    """Sizes of one layer's Mamba2; takes the place of an ``AttentionSpec``.

    Attributes:
        heads: Heads, each with a state [head_dim, state_size].
        groups: Heads / groups consecutive heads share B and C; the norm is over a group's channels.
        bias, conv_bias: Of the projections, and of the convolution.
        dt_limit: Least and largest Δ.
        out_bias: Of the output projection; None: as ``bias``.
        norm: Whether the gated output is normed.
        norm_first: Whether the norm stands in front of the gate.
    """

    hidden: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_width: int
    eps: float
    bias: bool = False
    conv_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    out_bias: bool | None = None
    norm: bool = True
    norm_first: bool = False
    state_name: ClassVar[str] = "ssm"

    @property
    def has_out_bias(self) -> bool:
        """Whether the output projection has a bias."""
        return self.bias if self.out_bias is None else self.out_bias

    def build_module(self, state_index: int) -> Mamba2:
        """The module; ``state_index``: the place of its first state among those of the model."""
        return Mamba2(self, state_index)

    @property
    def partition(self) -> StateHeadPartition:
        """How ranks divide the heads."""
        return StateHeadPartition("attn", self.heads, self.groups, self.head_dim, self.state_size)

    def row_reorder_steps(self, *, by_key_head: bool = False) -> dict[str, str]:
        """Rename steps that make the modules' rows from a checkpoint's z | x | B | C | dt."""
        assert not by_key_head, "rows are stored part by part"
        conv = self.width + self.conv_config.channels
        total = conv + self.heads
        return {
            "attn.conv": "depthwise",
            "attn.in_proj": f"rows:{self.width}-{conv}/0-{self.width}/{total}",
            "attn.rates": f"rows:{conv}-{total}/{total}",
        }

    def module_specs(self) -> tuple[ModuleSpec, ...]:
        """The modules as a layer's ``attn``; "attn_input" → "attn_out"."""
        inner, shared, tensors = "state_heads", "key_heads", linear_tensor_names(self.bias)
        return (
            LinearSpec(
                path="attn.in_proj", reads=("attn_input",), writes=("xbcz",), site="qkv",
                parts=(LinearRowBlock("x", self.width, inner),
                       LinearRowBlock("B", self.shared_width, shared),
                       LinearRowBlock("C", self.shared_width, shared),
                       LinearRowBlock("z", self.width, inner)),
                tensors=tensors,
            ),
            ModuleSpec(
                path="attn.rates", reads=("attn_input",), writes=("dt",), reference=("dt",),
                arithmetic="linear", tensors=tensors, op="head_projection",
            ),
            self.conv_config.make_module_spec("attn.conv", "xbcz", "mixed"),
            RecurrenceSpec(
                path="attn.ssm", reads=("mixed", "dt"), writes=("scanned",),
                reference=("ssm",), arithmetic="attention", tensors=("A_log", "dt_bias", "D"),
                state=self.state_spec, state_reference="ssm_state", op="ssd_scan",
            ),
            *self._gated_output_specs(),
        )  # fmt: skip

    def _gated_output_specs(self) -> tuple[ModuleSpec, ModuleSpec]:
        """Gate, norm and output projection."""
        gate, projection = self.output_module_specs(
            "scanned", "xbcz", linear_tensor_names(self.has_out_bias)
        )
        return gate if self.norm else UNNORMED_GATE_SPEC, projection


UNNORMED_GATE_SPEC = ModuleSpec(
    path="attn.gated_norm", reads=("scanned", "xbcz"), writes=("gated",),
    reference=("gated_norm",), op="gated_rms_norm",
)  # fmt: skip


class Mamba2(RecurrentMixer):
    """The mixer of one layer."""

    gated_norm: GatedGroupNorm | SiluGate

    def __init__(self, spec: Mamba2Spec, state_index: int) -> None:
        super().__init__(spec.groups)
        self.spec = spec
        self.in_proj = Linear(spec.hidden, 2 * spec.width + 2 * spec.shared_width, spec.bias)
        self.rates = PerHeadProjection(spec.hidden, spec.heads, bias=spec.bias)
        self.conv = CausalConv(spec.conv_config, state_index)
        self.ssm = StateSpaceScan(spec, state_index + 1)
        self.gated_norm = GatedGroupNorm(spec) if spec.norm else SiluGate()
        self.out_proj = Linear(spec.width, spec.hidden, spec.has_out_bias)

    @property
    def recurrence(self) -> StateSpaceScan:
        """The scan of the state space."""
        return self.ssm

    def keep_local_heads(self, heads: Range, kv_heads: Range) -> None:
        """Keep a rank's heads, and the groups that they read."""
        super().keep_local_heads(heads, kv_heads)
        spec = self.spec
        if isinstance(self.gated_norm, GatedGroupNorm):
            self.gated_norm.keep_local_heads(heads)
        inner = heads[0] * spec.head_dim, heads[1] * spec.head_dim
        first, end = (spec.width + group * spec.state_size for group in kv_heads)
        second = spec.shared_width
        self.conv.keep_local_channels(inner, (first, end), (second + first, second + end))


class StateSpaceScan(PerHeadRecurrence):
    """The recurrence over x, B, C behind the convolution and the steps."""

    D: torch.Tensor

    def __init__(self, spec: Mamba2Spec, state_index: int) -> None:
        super().__init__(spec, state_index)
        self.spec = spec
        self.register_buffer("D", torch.empty(spec.heads, device="meta"))

    def forward(self, mixed: torch.Tensor, dt: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, x | B | C], [T, heads] → [T, heads·head_dim] float32."""
        decay, skip = (
            (self.select_local_heads(self.A_log), self.select_local_heads(self.dt_bias)),
            self.select_local_heads(self.D),
        )
        return step.ops.ssd_scan(
            SSDScanInputs(
                mixed,
                dt,
                *decay,
                skip,
                self.spec.dt_limit,
                *self.layer_states_and_step_metadata(step),
            )
        )


class SiluGate(nn.Module):
    """x · silu(z)."""

    def forward(self, x: torch.Tensor, xbcz: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, heads·D] float32, [T, … | z] → [T, heads·D]."""
        z, width = gate_channels(xbcz, x.shape[1]), x.shape[1]
        return step.ops.gated_rms_norm(GatedRMSNormInputs(x, z, None, 0.0, width, gate_first=True))


def gate_channels(xbcz: torch.Tensor, width: int) -> torch.Tensor:
    """z, the last channels."""
    return xbcz[:, xbcz.shape[1] - width :]


class GatedGroupNorm(HeadSelectingModule):
    """x · silu(z), then RMSNorm of each group's channels; ranks add up their squares.

    ``norm_first``: the norm, then the gate.

    The weight has the values of all channels, also on a rank that computes some of them.
    """

    weight: torch.Tensor

    def __init__(self, spec: Mamba2Spec) -> None:
        super().__init__(spec.heads)
        self.spec = spec
        self.register_buffer("weight", torch.empty(spec.width, device="meta"))

    def forward(self, x: torch.Tensor, xbcz: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, heads·D] float32, [T, … | z] → [T, heads·D]."""
        spec, z = self.spec, gate_channels(xbcz, x.shape[1])
        if step.tp_group.size == 1:
            group, gate_first = spec.width // spec.groups, not spec.norm_first
            return step.ops.gated_rms_norm(
                GatedRMSNormInputs(x, z, self.weight, spec.eps, group, gate_first)
            )
        gate = batch_invariant_silu(z.float())
        if spec.norm_first:
            return (self._normed_over_ranks(x, step) * gate).to(xbcz.dtype)
        return self._normed_over_ranks(x * gate, step).to(xbcz.dtype)

    def _normed_over_ranks(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """RMSNorm of each group of this rank's channels, float32; other ranks may have the rest."""
        spec, (first, end) = self.spec, self.heads
        weight = select_row_ranges(
            self.weight, ((first * spec.head_dim, end * spec.head_dim),)
        ).float()
        heads = x.unflatten(1, (end - first, -1))
        group = torch.arange(first, end, device=x.device) // (spec.heads // spec.groups)
        sums = heads.new_zeros(len(x), spec.groups).index_add_(1, group, heads.square().sum(-1))
        sums = step.tp_group.all_reduce(sums, captured=step.is_graph_capturable)
        scale = torch.rsqrt(sums / (spec.width // spec.groups) + spec.eps)[:, group]
        return (heads * scale[..., None]).flatten(1) * weight
