"""diffllama: differential attention (arXiv:2410.05258, section 2.1).

Heads h and h + H/2 are a pair. With both values of its KV heads side by side, V = v₁ | v₂:
(1 − λ₀) · norm((softmax(q₁k₁ᵀ/√d) − λ softmax(q₂k₂ᵀ/√d)) V), λ₀ = 0.8 − 0.6 exp(−0.3 l) in layer l,
the first one 0. The engine has heads pair by pair, and keys k₁ k₁ k₂ k₂ with values v₁ v₂ v₁ v₂.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import (
    LayerRecorder,
    LayerWeights,
    ModuleWeights,
)
from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

LAMBDA_TENSOR_NAMES = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class DiffLlamaReference(PlainDecoderReference):
    """DiffLlamaForCausalLM."""

    DEFAULTS = ReferenceDefaults(eps=1e-5, theta=10000.0)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.biased = self.projections_with_bias()

    def token_mixer_weights(self, index: int) -> LayerWeights:
        """Read a layer's projections, heads pair by pair, and what λ is made of."""
        weights = super().token_mixer_weights(index)
        for name in "qkv":
            weight, bias, _ = weights[name]
            weights[name] = ModuleWeights(
                self._reorder_heads_by_pair(weight),
                None if bias is None else self._reorder_heads_by_pair(bias),
            )
        for name in LAMBDA_TENSOR_NAMES:
            weights[name] = ModuleWeights(
                self.source.get(f"{self.LAYERS}.{index}.self_attn.{name}")
            )
        return weights

    def _reorder_heads_by_pair(self, rows: Tensor) -> Tensor:
        """Return the rows of heads 0, H/2, 1, H/2 + 1, …."""
        halves = rows.reshape(2, -1, self.head_dim, *rows.shape[1:])
        return halves.transpose(0, 1).reshape(rows.shape)

    def run_token_mixer(
        self, index: int, r: LayerRecorder, normed: Tensor, prompt_length: int
    ) -> Tensor:
        """Run a layer's attention up to its output projection."""
        q, k, v = (r.linear(name, normed) for name in ("q", "k", "v"))
        count, group = len(q), self.num_heads // self.num_kv_heads
        # [T, pairs of KV heads, …, dim]
        queries = q.reshape(count, -1, group, 2, self.head_dim)
        keys, values = (x.reshape(count, -1, 2, self.head_dim) for x in (k, v))
        paged: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
        for pair in range(keys.shape[1]):
            for one in (0, 1):  # the map
                for two in (0, 1):  # the value
                    paged["q"] += [queries[:, pair, h, one] for h in range(group)]
                    paged["k"].append(keys[:, pair, one])
                    paged["v"].append(values[:, pair, two])
        sources = {"q": q, "k": k, "v": v}
        flat = {
            name: r.record(f"{name}_pairs", torch.cat(parts, -1), sources[name])
            for name, parts in paged.items()
        }
        for name in "qk":
            turned = self.apply_rope_to_heads(index, flat[name], prompt_length)
            flat[name] = r.record(f"{name}_rot", turned, flat[name])
        mixed = self.run_and_record_attention(index, r, flat["q"], flat["k"], flat["v"])
        return r.linear("o_proj", self._differential_attention_output(index, r, mixed, group))

    def _differential_attention_output(
        self, index: int, r: LayerRecorder, mixed: Tensor, group: int
    ) -> Tensor:
        """Subtract the second maps' outputs, norm both values together, and scale."""
        q1, k1, q2, k2 = (r.weights[name].weight for name in LAMBDA_TENSOR_NAMES)
        start = 0.8 - 0.6 * math.exp(-0.3 * index)
        factor = math.exp(float(q1 @ k1)) - math.exp(float(q2 @ k2)) + start
        parts = mixed.reshape(len(mixed), -1, 2, 2, group, self.head_dim)
        outputs = []
        for pair in range(parts.shape[1]):
            for head in range(group):
                one, two = (
                    torch.cat((parts[:, pair, m, 0, head], parts[:, pair, m, 1, head]), -1)
                    for m in (0, 1)
                )
                out = one - factor * two
                size = (out.square().mean(-1, keepdim=True) + self.eps).sqrt()
                outputs.append((1 - start) * out / size)
        return r.record("difference", torch.cat(outputs, -1), mixed)


REFERENCE = DiffLlamaReference
