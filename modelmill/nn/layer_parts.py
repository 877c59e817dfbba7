"""What a decoder layer is put together from: attention, MLP and norms, and how they are joined.

The layer classes (``pre_norm``, ``parallel_residual_layer``, ``post_norm``, ``sandwich``) take
these parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelmill.nn.attention import AttentionSpec
from modelmill.nn.differential_attention import DifferentialAttentionSpec
from modelmill.nn.gated_delta_net import GatedDeltaNetSpec
from modelmill.nn.latent_attention import LatentAttentionSpec
from modelmill.nn.layer_spec import LayerSpec, ModuleSpec
from modelmill.nn.mamba2 import Mamba2Spec
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_branch import MoEBranchSpec
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.norm import NormConfig
from modelmill.nn.per_layer_input import PerLayerInputSpec
from modelmill.nn.shared_kv_attention import SharedKVAttentionSpec
from modelmill.nn.short_conv import ShortConvSpec

RecurrenceConfig = GatedDeltaNetSpec | Mamba2Spec | ShortConvSpec
AttentionConfig = (
    AttentionSpec | SharedKVAttentionSpec | LatentAttentionSpec | DifferentialAttentionSpec
)
MixerSpec = AttentionConfig | RecurrenceConfig


@dataclass(frozen=True)
class LayerComponentSpecs:
    """The parts of one layer.

    Attributes:
        attention: Its attention, or the recurrence in its place.
        mlp: Its MLP or mixture of experts.
        norm: Its norms.
        branch_scale: Factor of both branches before they are added; None: 1.
        mlp_norm: In a parallel layer, whether the MLP has a norm of its own.
        experts: In a ``ScaledSandwichLayer``, experts beside the MLP, or None.
        layer_input: There, what it does with its input beside the stream, or None.
        parallel_recurrence: In a ``ParallelHybridLayer``, the recurrence beside the attention, or
            None.
        mixes_tokens: In a ``OneBranchLayer``, whether it has the attention and no MLP; otherwise
            the MLP alone.
    """

    attention: MixerSpec
    mlp: MLPSpec | MoESpec
    norm: NormConfig
    branch_scale: float | None = None
    mlp_norm: bool = False
    experts: MoEBranchSpec | None = None
    layer_input: PerLayerInputSpec | None = None
    parallel_recurrence: Mamba2Spec | None = None
    mixes_tokens: bool = True


def make_layer_spec(
    parts: LayerComponentSpecs, modules: tuple[ModuleSpec, ...], outputs: tuple[str, ...]
) -> LayerSpec:
    """A layer of these modules, with the sites and partitions of its mixer and its MLP."""
    return LayerSpec(
        modules=modules,
        sites=(*parts.attention.quant_sites, *parts.mlp.quant_sites()),
        outputs=outputs,
        partitions=(parts.attention.partition, *parts.mlp.partitions),
    )


def attention_norm_spec(norm: NormConfig) -> ModuleSpec:
    """The norm in front of a layer's attention, which starts or continues the stream."""
    return norm.make_module_spec(
        "attn_norm", ("branch", "residual"), ("attn_input", "stream"), "input_norm"
    )


def mlp_norm_spec(norm: NormConfig, attention_output: str) -> ModuleSpec:
    """The norm in front of a layer's MLP, which adds the attention's output to the stream."""
    return norm.make_module_spec(
        "mlp_norm",
        (attention_output, "stream"),
        ("mlp_input", "attn.residual"),
        "mlp_norm",
        "post_attn_residual",
    )
