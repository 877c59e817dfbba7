"""What a decoder layer is put together from: attention, MLP and norms, and how they are joined.

The layer classes (``pre_norm``, ``parallel_layer``, ``post_norm``, ``sandwich``) take these parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelmill.nn.attention import AttentionSpec
from modelmill.nn.gated_delta_net import GatedDeltaNetSpec
from modelmill.nn.latent_attention import LatentAttentionSpec
from modelmill.nn.layer_spec import ModuleSpec
from modelmill.nn.mamba2 import Mamba2Spec
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.norm import NormConfig

RecurrenceConfig = GatedDeltaNetSpec | Mamba2Spec
MixerSpec = AttentionSpec | LatentAttentionSpec | RecurrenceConfig


@dataclass(frozen=True)
class LayerParts:
    """The parts of one layer.

    Attributes:
        attention: Its attention, or the recurrence in its place.
        mlp: Its MLP or mixture of experts.
        norm: Its norms.
        branch_scale: Factor of both branches before they are added; None: 1.
        mlp_norm: In a parallel layer, whether the MLP has a norm of its own.
    """

    attention: MixerSpec
    mlp: MLPSpec | MoESpec
    norm: NormConfig
    branch_scale: float | None = None
    mlp_norm: bool = False


def attention_norm_spec(norm: NormConfig) -> ModuleSpec:
    """The norm in front of a layer's attention, which starts or continues the stream."""
    return norm.spec("attn_norm", ("branch", "residual"), ("attn_input", "stream"), "input_norm")
