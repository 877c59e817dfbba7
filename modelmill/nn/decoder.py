"""The pre-norm decoder that LLaMA, Mistral and the Qwens share.

A model file fills in its sizes and names; ``nn.fusion`` runs it with fewer and larger ops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from modelmill.nn.attention import Attention, AttentionSpec, RopeCosSin
from modelmill.nn.causal_lm import CausalLM
from modelmill.nn.embedding import LMHead, TokenEmbedding
from modelmill.nn.layer_spec import (
    INPUTS,
    ROPE,
    ChannelPartition,
    LayerSpec,
    ModuleSpec,
    NormSpec,
    SiteSpec,
)
from modelmill.nn.layer_stack import kv_shape
from modelmill.nn.mlp import GatedMLP
from modelmill.nn.norm import RMSNorm
from modelmill.nn.rotary import RopeSpec, Rotary
from modelmill.nn.step import Step


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches.

    Attributes:
        windows: Per layer the attention window or None; empty: no windows.
        logn: Qwen v1's seq_length, or None.
        max_len: The longest sequence by default.
        max_extended_len: The longest that may be requested, where that is more; None: ``max_len``.
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
    rope: RopeSpec
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    windows: tuple[int | None, ...] = ()
    logn: int | None = None
    max_extended_len: int | None = None

    def attention_spec(self, layer: int) -> AttentionSpec:
        """The attention of layer ``layer``."""
        return AttentionSpec(
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.qkv_bias,
            self.out_bias,
            self.qk_norm,
            self.eps,
            self.windows[layer] if self.windows else None,
        )

    def layer_spec(self, layer: int) -> LayerSpec:
        """What layer ``layer`` is made of."""
        mlp = GatedMLP.module_specs(self.hidden, self.inner, self.mlp_bias)
        return pre_norm_layer(self.attention_spec(layer), self.inner, mlp, GatedMLP.site_specs())


PRE_NORM_OUTPUTS = ("mlp_out", "attn.residual")
# the modules of a pre-norm layer outside its MLP, with what each reads
PRE_NORM_DATAFLOW = [
    ("attn_norm", INPUTS),
    ("attn.qkv_proj", ("attn_input",)),
    ("attn.rope_cache", ("qkv", ROPE)),
    ("attn.core", ("q",)),
    ("attn.o_proj", ("attn",)),
    ("mlp_norm", ("attn_out", "stream")),
]


def pre_norm_layer(
    attention: AttentionSpec,
    inner: int,
    mlp: tuple[ModuleSpec, ...],
    mlp_sites: tuple[SiteSpec, ...],
    norm_tensors: tuple[str, ...] = ("weight",),
    *,
    rotates: bool = True,
) -> LayerSpec:
    """A layer norm → attention → add and norm → MLP.

    Args:
        attention: The layer's attention.
        inner: Channels inside the MLP.
        mlp: The modules of the MLP, "mlp_input" → "mlp_out".
        mlp_sites: Their sites.
        norm_tensors: The tensors of each norm.
        rotates: Whether q and k are rotated.
    """
    norm_op = "layer_norm" if "bias" in norm_tensors else "add_rms_norm"
    attn_norm = NormSpec(
        path="attn_norm",
        reads=INPUTS,
        writes=("attn_input", "stream"),
        reference=("input_norm",),
        tensors=norm_tensors,
        op=norm_op,
    )
    mlp_norm = NormSpec(
        path="mlp_norm",
        reads=("attn_out", "stream"),
        writes=("mlp_input", "attn.residual"),
        reference=("mlp_norm",),
        stream_reference="post_attn_residual",
        tensors=norm_tensors,
        op=norm_op,
    )
    return LayerSpec(
        modules=(attn_norm, *attention.module_specs(rotates=rotates), mlp_norm, *mlp),
        sites=(*attention.site_specs, *mlp_sites),
        outputs=PRE_NORM_OUTPUTS,
        partitions=(attention.partition, ChannelPartition("inner", inner)),
    )


class PreNormLayer(nn.Module):
    """norm → attention → add and norm → MLP; the residual travels beside the branch.

    A subclass makes the parts.
    """

    spec: LayerSpec
    attn_norm: nn.Module
    attn: Attention
    mlp_norm: nn.Module
    mlp: nn.Module

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual), both [T, H]; their sum is the layer's output."""
        x, residual = self.attn_norm(x, residual, step)
        x = self.attn(x, rope, step)
        x, residual = self.mlp_norm(x, residual, step)
        return self.mlp(x, step), residual


class DecoderLayer(PreNormLayer):
    """A layer with RMSNorm and a gated MLP."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.spec = config.layer_spec(index)
        self.attn_norm = RMSNorm(config.hidden, config.eps)
        self.attn = Attention(config.attention_spec(index), index)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = GatedMLP(config.hidden, config.inner, config.mlp_bias)


class Decoder(CausalLM):
    """Token ids → logits."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = TokenEmbedding(config.vocab, config.hidden)
        self.rotary = Rotary(config.rope)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.layers))
        self.kv = kv_shape(self.layers)
        self.norm = RMSNorm(config.hidden, config.eps)
        self.head = LMHead(config.hidden, config.vocab)

    @property
    def rope_length_source(self) -> str:
        """Which length decides a token's rope key: fixed, prompt or running."""
        return self.rotary.rule

    def rope_key(self, length: int) -> int:
        """The rope key for a deciding length."""
        return self.rotary.key(length)

    def rope(self, step: Step) -> RopeCosSin:
        """The step's rotation, and Qwen v1's logn factors in the activations' rounding."""
        return RopeCosSin(*self.rotary(step, self.config.logn, self.embed.weight.dtype))
