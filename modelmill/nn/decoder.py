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
from modelmill.nn.kv import KVShape
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


class DecoderLayer(nn.Module):
    """norm → attention → add and norm → gated MLP; the residual travels beside the branch."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden, config.eps)
        self.attn = Attention(config.attention_spec(index), index)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = GatedMLP(config.hidden, config.inner, config.mlp_bias)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual), both [T, H]; their sum is the layer's output."""
        x, residual = self.attn_norm(x, residual, step)
        x = self.attn(x, rope, step)
        x, residual = self.mlp_norm(x, residual, step)
        return self.mlp(x, step), residual


class Decoder(CausalLM):
    """Token ids → logits."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.kv = KVShape(config.layers, config.kv_heads, config.head_dim)
        self.embed = TokenEmbedding(config.vocab, config.hidden)
        self.rotary = Rotary(config.rope)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.head = LMHead(config.hidden, config.vocab)

    @property
    def rope_rule(self) -> str:
        """Which length decides a token's rope key: fixed, prompt or running."""
        return self.rotary.rule

    def rope_key(self, length: int) -> int:
        """The rope key for a deciding length."""
        return self.rotary.key(length)

    def rope(self, step: Step) -> RopeCosSin:
        """The step's rotation, and Qwen v1's logn factors in the activations' rounding."""
        return RopeCosSin(*self.rotary(step, self.config.logn, self.embed.weight.dtype))
