"""Gated DeltaNet: linear attention with a decayed, corrected state (arXiv:2412.06464).

in_proj → short convolution of q, k and v → gated delta rule → norm of each head, gated by z →
out_proj. The rates of decay and correction come from a small matrix of their own, which is never
quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from modelmill.nn.causal_conv import CausalConv
from modelmill.nn.head_recurrence import HeadRecurrenceSpec, PerHeadProjection, PerHeadRecurrence
from modelmill.nn.layer_spec import LinearRowBlock, LinearSpec, ModuleSpec, RecurrenceSpec
from modelmill.nn.linear import Linear
from modelmill.nn.partition import StateHeadPartition
from modelmill.nn.recurrent_mixer import RecurrentMixer
from modelmill.nn.step import Step
from modelmill.ops.gated_delta_rule import GatedDeltaInputs
from modelmill.ops.gated_rms_norm import GatedRMSNormInputs
from modelmill.parallel.shard import Range


@dataclass(frozen=True)
class GatedDeltaNetSpec(HeadRecurrenceSpec):
    """Sizes of one layer's Gated DeltaNet; takes the place of an ``AttentionSpec``.

    Attributes:
        key_heads: Heads of q and k; each serves heads / key_heads consecutive heads.
        heads: Heads of values, each with a state [key_dim, value_dim].
        conv_width: Tokens that the convolution reads.
    """

    hidden: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    eps: float
    state_name: ClassVar[str] = "delta_rule"
    keys_first: ClassVar[bool] = True

    @property
    def partition(self) -> StateHeadPartition:
        """How ranks divide the heads."""
        return StateHeadPartition("attn", self.heads, self.key_heads, self.value_dim, self.key_dim)

    def build_module(self, state_index: int) -> GatedDeltaNet:
        """The module; ``state_index``: the place of its first state among those of the model."""
        return GatedDeltaNet(self, state_index)

    def row_reorder_steps(self, *, by_key_head: bool) -> dict[str, str]:
        """Rename steps that make the modules' rows from a checkpoint's, by module.

        by_key_head: Whether the checkpoint has q, k, v, z and b, a by head of keys.
        """
        steps = {"attn.conv": "depthwise"}
        if by_key_head:
            group = self.heads // self.key_heads
            values = group * self.value_dim
            parts = self.key_dim, self.key_dim, values, values
            steps["attn.in_proj"] = f"ungroup_rows:{self.key_heads}/" + "/".join(map(str, parts))
            steps["attn.rates"] = f"ungroup_rows:{self.key_heads}/{group}/{group}"
        return steps

    def module_specs(self) -> tuple[ModuleSpec, ...]:
        """The modules as a layer's ``attn``; "attn_input" → "attn_out"."""
        key, value = "key_heads", "state_heads"
        return (
            LinearSpec(
                path="attn.in_proj", reads=("attn_input",), writes=("qkvz",), site="qkv",
                parts=(LinearRowBlock("q", self.shared_width, key),
                       LinearRowBlock("k", self.shared_width, key),
                       LinearRowBlock("v", self.width, value),
                       LinearRowBlock("z", self.width, value)),
            ),
            ModuleSpec(
                path="attn.rates", reads=("attn_input",), writes=("ba",), reference=("b", "a"),
                arithmetic="linear", tensors=("weight",), op="head_projection",
            ),
            self.conv_config.make_module_spec("attn.conv", "qkvz", "mixed"),
            RecurrenceSpec(
                path="attn.delta_rule", reads=("mixed", "ba"), writes=("delta",),
                reference=("delta",), arithmetic="attention", tensors=("A_log", "dt_bias"),
                state=self.state_spec, state_reference="delta_state", op="gated_delta_rule",
            ),
            *self.output_module_specs("delta", "qkvz"),
        )  # fmt: skip


class GatedDeltaNet(RecurrentMixer):
    """The mixer of one layer."""

    def __init__(self, spec: GatedDeltaNetSpec, state_index: int) -> None:
        super().__init__(spec.key_heads)
        self.spec = spec
        self.in_proj = Linear(spec.hidden, 2 * spec.width + 2 * spec.shared_width)
        self.rates = PerHeadProjection(spec.hidden, spec.heads, parts=2)
        self.conv = CausalConv(spec.conv_config, state_index)
        self.delta_rule = DeltaRule(spec, state_index + 1)
        self.gated_norm = GatedHeadNorm(spec.value_dim, spec.eps)
        self.out_proj = Linear(spec.width, spec.hidden)

    @property
    def recurrence(self) -> DeltaRule:
        """The delta rule."""
        return self.delta_rule

    def keep_local_heads(self, heads: Range, kv_heads: Range) -> None:
        """Keep a rank's heads of values and of keys."""
        super().keep_local_heads(heads, kv_heads)
        spec = self.spec
        keys = kv_heads[0] * spec.key_dim, kv_heads[1] * spec.key_dim
        second = spec.shared_width
        values = 2 * second + heads[0] * spec.value_dim, 2 * second + heads[1] * spec.value_dim
        self.conv.keep_local_channels(keys, (second + keys[0], second + keys[1]), values)


class DeltaRule(PerHeadRecurrence):
    """The recurrence over q, k, v behind the convolution and the rates."""

    def forward(self, mixed: torch.Tensor, rates: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, q | k | v], [T, b | a] → [T, heads·value_dim]."""
        decay = self.select_local_heads(self.A_log), self.select_local_heads(self.dt_bias)
        return step.ops.gated_delta_rule(
            GatedDeltaInputs(mixed, rates, *decay, *self.layer_states_and_step_metadata(step))
        )


class GatedHeadNorm(nn.Module):
    """RMSNorm of each head, times silu(z); z is behind the channels that are convolved."""

    weight: torch.Tensor

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(dim, device="meta"))

    def forward(self, x: torch.Tensor, qkvz: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, heads·D] float32, [T, … | z] → [T, heads·D]."""
        z, dim = qkvz[:, qkvz.shape[1] - x.shape[1] :], len(self.weight)
        return step.ops.gated_rms_norm(
            GatedRMSNormInputs(x, z, self.weight, self.eps, dim, gate_first=False)
        )
