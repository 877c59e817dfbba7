"""The pre-norm decoder that LLaMA, Mistral and the Qwens share; a model file fills in its sizes and
names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from modelmill.nn.attention import Attention, AttentionSpec, RopeCosSin
from modelmill.nn.embedding import LMHead, TokenEmbedding
from modelmill.nn.fused_decode import MAX_FUSED_TOKENS, StackedWeights, run_fused_decode
from modelmill.nn.kv import KVShape
from modelmill.nn.logit_rows import select_logit_rows
from modelmill.nn.mlp import GatedMLP
from modelmill.nn.norm import RMSNorm
from modelmill.nn.rotary import RopeSpec, Rotary
from modelmill.nn.step import Step


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches. windows: per layer the attention window or None. logn: Qwen v1's
    seq_length, or None.

    max_len: the usual longest sequence; max_extended_len: the longest that may be asked for, where
    that is more.
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
        """What layer ``layer``'s attention is made of."""
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
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor | None,
        rope: RopeCosSin,
        step: Step,
        logit_step: Step | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(branch, residual), both [T, H], or of the rows of ``logit_step``; their sum is the
        layer's output.

        A branch of None was added to the residual where it was computed.
        """
        x, residual = self.attn_norm(x, residual, step, self.attn.qkv_proj.act_quant(step))
        if logit_step is not None:
            residual = residual[step.logit_rows]
        x = self.attn(x, rope, step, logit_step, residual)
        step = logit_step or step
        x, residual = self.mlp_norm(x, residual, step, self.mlp.gate_up_proj.act_quant(step))
        return self.mlp(x, step, residual), residual


class Decoder(nn.Module):
    """Token ids → logits.

    ``config``, ``kv`` and ``rope_rule``/``rope_key`` are what the runtime asks of a model.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.kv = KVShape(config.layers, config.kv_heads, config.head_dim)
        self.embed = TokenEmbedding(config.vocab, config.hidden)
        self.rotary = Rotary(config.rope)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.head = LMHead(config.hidden, config.vocab)
        self._stacked_weights = StackedWeights(self.layers, self.norm, self.head)

    @property
    def rope_rule(self) -> str:
        """Which length decides a token's rope key: fixed, prompt or running."""
        return self.rotary.rule

    def rope_key(self, length: int) -> int:
        """The rope key for a deciding length."""
        return self.rotary.key(length)

    def forward(self, step: Step) -> torch.Tensor:
        """Logits [R, V] float32 of the rows that the step asks for."""
        rope = self.rope(step)
        x: torch.Tensor = self.embed(step.ids, step)
        if (
            step.fuse
            and step.tp_group.size == 1
            and step.ops.decode is not None
            and len(x) <= MAX_FUSED_TOKENS
            and not step.kv.k_scale
        ):
            stack = self._stacked_weights.stack()
            if stack is not None:
                return run_fused_decode(step.ops.decode, stack, x, rope, step)
        return self.head(self._run_layers(x, rope, step), step)

    def hidden_states(self, step: Step) -> torch.Tensor:
        """What the head reads: the normed final states [R, H] of the rows that the step asks
        for.
        """
        return self._run_layers(self.embed(step.ids, step), self.rope(step), step)

    def _run_layers(self, x: torch.Tensor, rope: RopeCosSin, step: Step) -> torch.Tensor:
        """Embeddings [T, H] through all layers and the last norm, [R, H]."""
        residual: torch.Tensor | None = None
        *layers, end = self.layers
        for layer in layers:
            x, residual = layer(x, residual, rope, step)
        last = select_logit_rows(step)
        x, residual = end(x, residual, rope, step, last)
        if last is None and step.logit_rows is not None:
            x, residual = None if x is None else x[step.logit_rows], residual[step.logit_rows]
        x, _ = self.norm(x, residual, step)
        return x

    def rope(self, step: Step) -> RopeCosSin:
        """The step's rotation, and Qwen v1's logn factors in the activations' rounding."""
        return RopeCosSin(*self.rotary(step, self.config.logn, self.embed.weight.dtype))
