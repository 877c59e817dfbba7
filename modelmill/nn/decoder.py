"""The pre-norm decoder that LLaMA, Mistral and the Qwens share; a model file fills in its sizes and names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from modelmill.nn.attention import Attention, AttentionSpec, Rope
from modelmill.nn.embedding import Embedding, Head
from modelmill.nn.fused import MOST_TOKENS, Gathered, decode
from modelmill.nn.kv import KVShape
from modelmill.nn.last import narrowed
from modelmill.nn.mlp import GatedMLP
from modelmill.nn.norm import RMSNorm
from modelmill.nn.rotary import RopeSpec, Rotary
from modelmill.nn.step import Step


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches. windows: per layer the attention window or None. logn: Qwen v1's seq_length, or None.

    max_len: the usual longest sequence; limit: the longest that may be asked for, where that is more.
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
    head_norm: bool = False
    tied: bool = False
    windows: tuple[int | None, ...] = ()
    logn: int | None = None
    limit: int | None = None

    def attention(self, layer: int) -> AttentionSpec:
        """What layer ``layer``'s attention is made of."""
        return AttentionSpec(
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.qkv_bias,
            self.out_bias,
            self.head_norm,
            self.eps,
            self.windows[layer] if self.windows else None,
        )


class DecoderLayer(nn.Module):
    """norm → attention → add and norm → gated MLP; the residual travels beside the branch."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden, config.eps)
        self.attn = Attention(config.attention(index), index)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = GatedMLP(config.hidden, config.inner, config.mlp_bias)

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor | None, rope: Rope, step: Step, last: Step | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(branch, residual), both [T, H], or of the rows of ``last``; their sum is the layer's output.

        A branch of None was added to the residual where it was computed.
        """
        x, residual = self.attn_norm(x, residual, step, self.attn.qkv_proj.wanted(step))
        if last is not None:
            residual = residual[step.logit_rows]
        x = self.attn(x, rope, step, last, residual)
        step = last or step
        x, residual = self.mlp_norm(x, residual, step, self.mlp.gate_up_proj.wanted(step))
        return self.mlp(x, step, residual), residual


class Decoder(nn.Module):
    """Token ids → logits. ``config``, ``kv`` and ``rope_rule``/``rope_key`` are what the runtime asks of a model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.kv = KVShape(config.layers, config.kv_heads, config.head_dim)
        self.embed = Embedding(config.vocab, config.hidden)
        self.rotary = Rotary(config.rope)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.head = Head(config.hidden, config.vocab)
        self._gathered = Gathered(self.layers, self.norm, self.head)

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
            step.whole
            and step.mesh.size == 1
            and step.ops.decode is not None
            and len(x) <= MOST_TOKENS
            and not step.kv.k_scale
        ):
            stack = self._gathered.stack()
            if stack is not None:
                return decode(step.ops.decode, stack, x, rope, step)
        return self.head(self._through(x, rope, step), step)

    def states(self, step: Step) -> torch.Tensor:
        """What the head reads: the normed final states [R, H] of the rows that the step asks for."""
        return self._through(self.embed(step.ids, step), self.rope(step), step)

    def _through(self, x: torch.Tensor, rope: Rope, step: Step) -> torch.Tensor:
        """Embeddings [T, H] through all layers and the last norm, [R, H]."""
        residual: torch.Tensor | None = None
        *layers, end = self.layers
        for layer in layers:
            x, residual = layer(x, residual, rope, step)
        last = narrowed(step)
        x, residual = end(x, residual, rope, step, last)
        if last is None and step.logit_rows is not None:
            x, residual = None if x is None else x[step.logit_rows], residual[step.logit_rows]
        x, _ = self.norm(x, residual, step)
        return x

    def rope(self, step: Step) -> Rope:
        """The step's rotation, and Qwen v1's logn factors in the activations' rounding."""
        return Rope(*self.rotary(step, self.config.logn, self.embed.weight.dtype))
