"""Decoders of Gated DeltaNet (arXiv:2412.06464) and gated attention (arXiv:2505.06708).

The recurrence is computed token by token, as equation 10 of the paper has it: with S [dv, dk],

    S_t = S_{t−1} α_t (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,    o_t = S_t q_t

behind a causal convolution of q, k and v with SiLU, lengths of 1 for q and k, and q / √dk. Norms
are stored less 1, except the one behind the recurrence, whose output silu(z) gates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights, rms_norm
from modelmill.accept.reference.causal_convolution import causal_convolution
from modelmill.accept.reference.hybrid_layers import HybridLayersMixin
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.rope import ReferenceRope, partial_rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

LINEAR_ATTENTION = "linear_attention"
DEFAULT_PARTIAL_ROTARY_FACTOR = 0.25
L2_NORM_EPS = 1e-6


class GatedDeltaNetMixin(HybridLayersMixin, PerHeadQKNormMixin):
    """A decoder, some layers of which have a recurrence in the place of attention.

    Attributes:
        rows_grouped_by_key_head: whether the projection's rows are stored by head of keys.
    """

    rows_grouped_by_key_head = True
    has_qk_norm = True  # in layers with attention

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        config = {"num_key_value_heads": 2, "head_dim": 256} | config
        super().__init__(source, config)
        self.score_scale = self.head_dim**-0.5
        self.key_heads = int(config.get("linear_num_key_heads", 16))
        self.value_heads = int(config.get("linear_num_value_heads", 32))
        self.key_dim = int(config.get("linear_key_head_dim", 128))
        self.value_dim = int(config.get("linear_value_head_dim", 128))
        self.group = self.value_heads // self.key_heads
        length = int(config.get("max_position_embeddings") or 32768)
        self.rope = self.make_rope(config, length)
        self.biased = self.projections_with_bias()
        every, types = int(config.get("full_attention_interval") or 4), config.get("layer_types")
        self.recurrent = [
            types[i] == LINEAR_ATTENTION if types else (i + 1) % every != 0
            for i in range(self.num_layers)
        ]

    def unused_tensor_patterns(self) -> dict[str, str]:
        """Return those of multi-token prediction."""
        return {r"mtp\..*": "the layers of multi-token prediction"}

    def make_rope(self, config: dict[str, Any], length: int) -> ReferenceRope:
        """Return the rotation of a part of each head."""
        return partial_rope_from_config(
            config, self.head_dim, length, factor=DEFAULT_PARTIAL_ROTARY_FACTOR
        )

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return the weight of a norm, which is stored less 1."""
        if name in PER_HEAD_QK_NORM_PATHS:
            weight = self.source.get(f"{self.LAYERS}.{index}.self_attn.{name}.weight")
            return ModuleWeights(weight[self.engine_channel_order()] + 1)
        return ModuleWeights(super().norm_weights(index, name).weight + 1)

    def layer_weights(self, index: int) -> LayerWeights:
        """Read the weights of one layer in float32."""
        weights = {name: self.norm_weights(index, name) for name in self.norm_module_names()}
        for name, affine in self.mixer_and_mlp_weights(index).items():
            turned = name in ("q", "k") and not self.recurrent[index]
            weights[name] = self.to_engine_channel_order(affine) if turned else affine
        return weights

    def token_mixer_weights(self, index: int) -> LayerWeights:
        """Read a layer's attention with its gate, or its recurrence."""
        stem = f"{self.LAYERS}.{index}"
        if self.recurrent[index]:
            return self.delta_net_weights(f"{stem}.linear_attn")
        weights = super().token_mixer_weights(index)
        q, gate = (self._select_q_or_gate(weights["q"], part) for part in (0, 1))
        norms = {name: self.norm_weights(index, name) for name in PER_HEAD_QK_NORM_PATHS}
        return weights | {"q": q, "attn_gate": gate} | norms

    def _select_q_or_gate(self, both: ModuleWeights, part: int) -> ModuleWeights:
        """Of each head, its rows of q (0) or of its gate (1)."""

        def select(rows: Tensor) -> Tensor:
            heads = rows.reshape(self.num_heads, 2, self.head_dim, *rows.shape[1:])
            return heads[:, part].reshape(-1, *rows.shape[1:])

        return ModuleWeights(select(both.weight), None if both.bias is None else select(both.bias))

    def delta_net_weights(self, stem: str) -> LayerWeights:
        """Read a recurrence, its rows as all of q, k, v, z, b and a."""
        get = self.source.get
        names = {
            "conv": "conv1d.weight", "A_log": "A_log", "dt_bias": "dt_bias",
            "gated_norm": "norm.weight", "o_proj": "out_proj.weight",
        }  # fmt: skip
        weights = {name: ModuleWeights(get(f"{stem}.{path}")) for name, path in names.items()}
        values = self.group * self.value_dim
        if self.rows_grouped_by_key_head:
            qkvz = get(f"{stem}.in_proj_qkvz.weight").unflatten(0, (self.key_heads, -1))
            ba = get(f"{stem}.in_proj_ba.weight").unflatten(0, (self.key_heads, -1))
            parts = qkvz.split([self.key_dim, self.key_dim, values, values], 1)
            rows = [each.flatten(0, 1) for each in (*parts, *ba.chunk(2, 1))]
        else:
            keys, width = self.key_heads * self.key_dim, self.value_heads * self.value_dim
            qkv = get(f"{stem}.in_proj_qkv.weight").split([keys, keys, width])
            rows = [*qkv, *(get(f"{stem}.in_proj_{name}.weight") for name in "zba")]
        return weights | {n: ModuleWeights(r) for n, r in zip("qkvzba", rows, strict=True)}

    def run_recurrent_mixer(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run a layer's recurrence up to its output projection."""
        q, k, v, z, b, a = (r.linear(name, normed) for name in "qkvzba")
        mixed = self.causal_conv_and_silu(r, torch.cat((q, k, v), -1))
        out = self.delta_rule(r, mixed, b, a)
        heads = out.reshape(len(out), -1, self.value_dim)
        gated = rms_norm(heads, r.weights["gated_norm"], self.eps).reshape(out.shape) * F.silu(z)
        return r.linear("o_proj", r.record("gated_norm", gated, out, z))

    def causal_conv_and_silu(self, r: LayerRecorder, x: Tensor) -> Tensor:
        """Convolve each channel with its weights over the tokens before, then SiLU."""
        weight = r.weights["conv"].weight[:, 0]
        return r.record("conv", F.silu(causal_convolution(r, x, weight, None)), x)

    def delta_rule(self, r: LayerRecorder, mixed: Tensor, b: Tensor, a: Tensor) -> Tensor:
        """Run the recurrence over q, k, v [T, …] and the rates b, a [T, heads]."""
        keys = self.key_heads * self.key_dim
        q, k, v = mixed.split([keys, keys, self.value_heads * self.value_dim], -1)
        q, k = (self._l2_normalize_and_repeat(t.reshape(len(t), -1, self.key_dim)) for t in (q, k))
        v = v.reshape(len(v), -1, self.value_dim)
        beta = b.sigmoid()
        decay = torch.exp(-r.weights["A_log"].weight.exp() * F.softplus(a + self._dt_bias(r)))
        state = v.new_zeros(self.value_heads, self.value_dim, self.key_dim)
        identity = torch.diag(v.new_ones(self.key_dim))
        out = torch.empty_like(v)
        for t in range(len(v)):
            rate = beta[t, :, None, None]
            outer = k[t, :, :, None] * k[t, :, None, :]
            kept = decay[t, :, None, None] * (identity - rate * outer)
            state = state @ kept + rate * v[t, :, :, None] * k[t, :, None, :]
            out[t] = (state @ q[t, :, :, None])[..., 0] / self.key_dim**0.5
        r.record("delta_state", state.transpose(1, 2).reshape(1, -1), mixed, b, a)
        return r.record("delta", out.reshape(len(out), -1), mixed, b, a)

    def _dt_bias(self, r: LayerRecorder) -> Tensor:
        return r.weights["dt_bias"].weight

    def _l2_normalize_and_repeat(self, x: Tensor) -> Tensor:
        """Vectors of length 1, of keys repeated for the values that share them."""
        x = x / (x.square().sum(-1, keepdim=True) + L2_NORM_EPS).sqrt()
        return x.repeat_interleave(self.group, 1)
