"""The decoder that almost all families share: embedding, layers of one class, norm, head.

A model file fills in its sizes and names; ``nn.fusion`` runs it with fewer and larger ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import nn

from modelmill.nn.alibi import AlibiConfig
from modelmill.nn.attention import AttentionSpec, RopeCosSin
from modelmill.nn.attention_temperature import AttentionTemperature
from modelmill.nn.causal_lm import CausalLM
from modelmill.nn.differential_attention import DifferentialAttentionSpec, lambda_init
from modelmill.nn.embedding_and_head import (
    LMHead,
    NormedEmbedding,
    TokenAndPositionEmbedding,
    TokenEmbedding,
)
from modelmill.nn.latent_attention import LatentAttentionSpec
from modelmill.nn.layer_parts import (
    AttentionConfig,
    LayerComponentSpecs,
    MixerSpec,
    RecurrenceConfig,
)
from modelmill.nn.layer_spec import LayerSpec, RecurrenceSpec, RopeCacheSpec
from modelmill.nn.layer_stack import kv_shape, state_shape
from modelmill.nn.mamba2 import Mamba2Spec
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.norm import RMS_NORM, NormConfig
from modelmill.nn.post_norm import PostNormLayer
from modelmill.nn.pre_norm import MixerLayer, PreNormLayer
from modelmill.nn.qkv_norm import QKNormConfig
from modelmill.nn.rotary import RopeSpec, Rotary
from modelmill.nn.step import Step
from modelmill.nn.sub_norm import NormedMLPSpec

LayerClass = type[MixerLayer | PostNormLayer]


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches.

    Attributes:
        max_len: The longest sequence by default.
        rope: The rotation; None: positions are learned or absent.
        windows: Per layer the attention window or None; empty: no windows.
        logn: Qwen v1's seq_length, or None.
        max_extended_len: The longest that may be requested, where that is more; None: ``max_len``.
        layer: How a layer joins its parts.
        norm: The kind of all norms.
        gated: Whether the MLP is gated.
        attention_scale: Factor of the scores; None: 1 / √head_dim.
        embedding_scale, branch_scale, logit_scale: Factors of the embeddings, of each branch before
            it is added (``ScaledBranchLayer``), and of the logits; None: 1.
        unrotated_layers: Layers whose queries and keys are not rotated.
        local_rope: The rotation of layers with a window, where that is another one.
        normed_head: Whether the head's rows are divided by their norms when they are read.
        logit_softcap: Bound that the logits approach, or None.
        attention_softcap: Bound that attention scores approach, or None.
        alibi: A bias of attention scores by distance, or None.
        sinks: Whether attention has a learned logit per head beside the keys'.
        embedding_norm: Whether the embeddings are normed.
        qkv_clip: Bound of the absolute values of q, k and v, or None.
        latent_attention: In the place of the usual attention, or None.
        moe: The mixture of experts in the place of the MLP; None: there is none.
        dense_layers: Layers that have an MLP all the same.
        first_position_row: The learned position table's row of position 0; None: no such table.
        recurrence: The recurrence in the place of attention (a hybrid), or None.
        recurrent_layers: The layers that have it.
        parallel_recurrence: The recurrence beside the attention of each layer
            (``ParallelHybridLayer``), or None.
        output_gate: Whether a projection gates the output of the attention.
        head_gates, gate_bias: As in ``AttentionSpec``.
        attention_temperature: Factors of rotated queries by position, or None.
        rotates_first: Whether queries and keys are rotated in front of ``qk_norm``.
        differential: Whether attention is the difference of two maps.
        sub_norms: Whether norms stand in front of the last products of attention and MLP.
        mlp_layers: Of ``OneBranchLayer``, those that have an MLP or experts and no attention.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    max_len: int
    rope: RopeSpec | None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    windows: tuple[int | None, ...] = ()
    logn: int | None = None
    max_extended_len: int | None = None
    layer: LayerClass = PreNormLayer
    norm: str = RMS_NORM
    gated: bool = True
    activation: str = "silu"
    mlp_norm: bool = False
    qkv_norm: QKNormConfig | None = None
    head_bias: bool = False
    attention_scale: float | None = None
    embedding_scale: float | None = None
    branch_scale: float | None = None
    logit_scale: float | None = None
    unrotated_layers: frozenset[int] = frozenset()
    moe: MoESpec | None = None
    dense_layers: frozenset[int] = frozenset()
    first_position_row: int | None = None
    local_rope: RopeSpec | None = None
    normed_head: bool = False
    logit_softcap: float | None = None
    attention_softcap: float | None = None
    alibi: AlibiConfig | None = None
    sinks: bool = False
    embedding_norm: bool = False
    qkv_clip: float | None = None
    latent_attention: LatentAttentionSpec | None = None
    recurrence: RecurrenceConfig | None = None
    recurrent_layers: frozenset[int] = frozenset()
    parallel_recurrence: Mamba2Spec | None = None
    output_gate: bool = False
    attention_temperature: AttentionTemperature | None = None
    rotates_first: bool = False
    mlp_layers: frozenset[int] = frozenset()
    sub_norms: bool = False
    differential: bool = False
    head_gates: bool = False
    gate_bias: bool | None = None

    def mixer_spec(self, layer: int) -> MixerSpec:
        """The attention of layer ``layer``, or the recurrence in its place."""
        if self.recurrence is not None and layer in self.recurrent_layers:
            return self.recurrence
        return self.attention_spec(layer)

    def attention_spec(self, layer: int) -> AttentionConfig:
        """The attention of layer ``layer``."""
        if self.latent_attention is not None:
            return self.latent_attention
        sizes = self.hidden, self.heads, self.kv_heads, self.head_dim
        if self.differential:
            return DifferentialAttentionSpec(*sizes, self.qkv_bias, self.eps, lambda_init(layer))
        window = self.windows[layer] if self.windows else None
        return AttentionSpec(
            *sizes,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            gated=self.output_gate,
            head_gates=self.head_gates,
            gate_bias=self.gate_bias,
            out_norm=self.sub_norms,
            window=window,
            scale=self.attention_scale,
            softcap=self.attention_softcap,
            alibi=self.alibi,
            sinks=self.sinks,
            rotates=self.rope is not None and layer not in self.unrotated_layers,
            rotates_first=self.rotates_first,
            local_rope=self.local_rope is not None and window is not None,
            qk_norm=self.qk_norm,
            qkv_norm=self.qkv_norm,
            qkv_clip=self.qkv_clip,
            eps=self.eps,
        )

    def mlp_spec(self, layer: int) -> MLPSpec | MoESpec:
        """The MLP or mixture of experts of layer ``layer``."""
        if self.moe is not None and layer not in self.dense_layers:
            return self.moe
        sizes = self.hidden, self.inner, self.gated, self.activation, self.mlp_bias
        return NormedMLPSpec(*sizes, eps=self.eps) if self.sub_norms else MLPSpec(*sizes)

    def layer_parts(self, layer: int) -> LayerComponentSpecs:
        """The parts of layer ``layer``."""
        return LayerComponentSpecs(
            self.mixer_spec(layer),
            self.mlp_spec(layer),
            self.norm_config,
            self.branch_scale,
            self.mlp_norm,
            parallel_recurrence=self.parallel_recurrence,
            mixes_tokens=layer not in self.mlp_layers,
        )

    def layer_spec(self, layer: int) -> LayerSpec:
        """What layer ``layer`` is made of."""
        return self.layer.layer_spec(self.layer_parts(layer))

    @property
    def norm_config(self) -> NormConfig:
        """The norms."""
        return NormConfig(self.hidden, self.eps, self.norm)


class Decoder(CausalLM):
    """Token ids → logits."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = _make_embedding(config)
        self.rotary = None if config.rope is None else Rotary(config.rope)
        self.local_rotary = None if config.local_rope is None else Rotary(config.local_rope)
        self._windows_decide_rope = (
            self.local_rotary is not None
            and self.rotary is not None
            and self.rotary.rule == "fixed"
        )
        self.layers = nn.ModuleList(_make_layers(config))
        self.kv, self.state = kv_shape(self.layers), state_shape(self.layers)
        self.norm = config.norm_config.build_module(reduces=not config.layer.returns_whole_branch)
        self.head = LMHead(
            config.hidden,
            config.vocab,
            config.head_bias,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
        )

    @property
    def rope_length_source(self) -> str:
        """Which length decides a token's rope frequency id: fixed, prompt or running."""
        rotary = self._length_dependent_rotary
        return "fixed" if rotary is None else rotary.rule

    def rope_frequency_id(self, length: int) -> int:
        """The rope frequency id for a deciding length."""
        rotary = self._length_dependent_rotary
        return 0 if rotary is None else rotary.frequency_id_for_length(length)

    @property
    def _length_dependent_rotary(self) -> Rotary | None:
        """The rotation that may change with the length: full attention's before the windows'."""
        return self.local_rotary if self._windows_decide_rope else self.rotary

    def compute_rope_cos_sin(self, step: Step) -> RopeCosSin:
        """The step's rotation, and that of layers with a window where it is another one."""
        if self.rotary is None:
            return RopeCosSin()
        rope = self._rotary_cos_sin(self.rotary, step)
        if self.local_rotary is None:
            return rope
        return replace(rope, local=self._rotary_cos_sin(self.local_rotary, step))

    def _rotary_cos_sin(self, rotary: Rotary, step: Step) -> RopeCosSin:
        """A rotation, with factors of queries by position in the activations' rounding.

        Channels beyond the rotated ones are turned by no angle.
        """
        growth, dtype = self.config.attention_temperature, self.embed.weight.dtype
        cos, sin, q_scale = rotary(step, self.config.logn, dtype)
        if growth is not None:
            q_scale = growth.factors(step.positions, dtype)
        rest = self.config.head_dim // 2 - cos.shape[1]
        if rest > 0:
            cos, sin = F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))
        return RopeCosSin(cos, sin, q_scale)


def _make_layers(config: DecoderConfig) -> Iterator[nn.Module]:
    """The layers; a mixer knows its place among the KV caches, or among the states."""
    caches = states = 0
    for number in range(config.layers):
        mixes_tokens = number not in config.mlp_layers
        modules = config.mixer_spec(number).module_specs() if mixes_tokens else ()
        num_states = sum(isinstance(module, RecurrenceSpec) for module in modules)
        yield config.layer(config.layer_parts(number), states if num_states else caches)
        states += num_states
        caches += sum(isinstance(module, RopeCacheSpec) for module in modules)


def _make_embedding(config: DecoderConfig) -> TokenEmbedding:
    sizes = config.vocab, config.hidden
    if config.embedding_norm:
        return NormedEmbedding(*sizes, config.norm_config)
    if config.first_position_row is None:
        return TokenEmbedding(*sizes, config.embedding_scale)
    return TokenAndPositionEmbedding(*sizes, config.max_len, config.first_position_row)
