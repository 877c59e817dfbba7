"""gpt_oss: sinks, windows in every other layer, experts with a clamped gate (arXiv:2508.10925).

The model card gives the router (the largest logits, then softmax) and the gate; MXFP4 is expanded
from the OCP Microscaling Formats specification 1.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

DEFAULT_YARN_SCALING = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip


class GptOssReference(PlainDecoderReference):
    """GptOssForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=8, head_dim=64, eps=1e-5, positions=131072)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.biased = self.projections_with_bias(default=True)
        scaled = config.get("rope_scaling") or config.get("rope_parameters")
        scaling: dict[str, Any] = {} if scaled else {"rope_parameters": DEFAULT_YARN_SCALING}
        self.rope = self.build_rope(rope_theta=config.get("rope_theta") or 150000.0, **scaling)
        self.windows = self.sliding_windows_by_layer(int(config.get("sliding_window", 128)), 2)
        self.num_experts = int(config.get("num_local_experts") or config.get("num_experts") or 128)
        self.top_k = int(config.get("num_experts_per_tok") or 4)
        self.alpha = float(config.get("swiglu_alpha") or 1.702)
        self.gate_bound = float(config.get("swiglu_limit") or 7.0)

    def attention_sinks(self, index: int) -> Tensor | None:
        """Return the sinks [heads] of a layer."""
        return self.source.get(f"{self.LAYERS}.{index}.self_attn.sinks")

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's attention, router and experts."""
        stem = f"{self.LAYERS}.{index}"
        weights = {
            name: self.read_linear(f"{stem}.{self.projection_paths[name]}", name in self.biased)
            for name in ("q", "k", "v", "o_proj")
        }
        weights["router"] = self.read_linear(f"{stem}.mlp.router", True)
        if self.source.has(f"{stem}.mlp.experts.0.gate_proj.weight"):  # GGUF
            for part in ("gate", "up", "down"):
                for expert in range(self.num_experts):
                    own = f"{stem}.mlp.experts.{expert}.{part}_proj.weight"
                    weights[f"experts.{expert}.{part}"] = ModuleWeights(self.source.get(own))
            for name, affine in weights.items():
                if name.startswith("experts."):
                    bias = self.source.get(f"{stem}.mlp.{name}_proj.bias")
                    weights[name] = affine._replace(bias=bias)
            return weights
        for matrix, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            name = f"{stem}.mlp.experts.{matrix}"
            biases = self.source.get(f"{name}_bias")
            for expert in range(self.num_experts):
                rows = self._read_expert_matrix(name, expert)
                for first, part in enumerate(parts):
                    weights[f"experts.{expert}.{part}"] = ModuleWeights(
                        rows[first :: len(parts)], biases[expert, first :: len(parts)]
                    )
        return weights

    def _read_expert_matrix(self, name: str, expert: int) -> Tensor:
        """Return an expert's matrix [out, in]; gate and up take turns."""
        if not self.source.has(f"{name}_blocks"):
            return self.source.read_uncast_tensor(name)[expert].to(self.device, self.dtype).T
        blocks = self.source.read_uncast_tensor(f"{name}_blocks")[expert].to(self.device)
        exponents = self.source.read_uncast_tensor(f"{name}_scales")[expert].to(self.device)
        codes = torch.stack((blocks % 16, blocks // 16), dim=-1).flatten(2).long()
        return (decode_e2m1(codes).to(self.dtype) * self._decode_e8m0(exponents)).flatten(1)

    def _decode_e8m0(self, exponents: Tensor) -> Tensor:
        return 2.0 ** (exponents.to(torch.float64) - 127).to(self.dtype)[..., None]

    def mlp(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run the experts whose logits are the largest."""
        logits = r.linear("router", normed)
        routing = torch.zeros_like(logits)
        for token, row in enumerate(logits):
            best = sorted(range(len(row)), key=lambda e: -float(row[e]))[: self.top_k]
            routing[token, best] = row[best].softmax(-1)
        total = self.run_and_combine_experts(r, normed, routing, logits, self._run_expert)
        return r.record("mlp_out", total, normed)

    def _run_expert(self, r: LayerRecorder, name: str, x: Tensor) -> Tensor:
        r.record(f"{name}.input", x)
        gate, up = r.linear(f"{name}.gate", x), r.linear(f"{name}.up", x)
        act = r.record(f"{name}.act", self.clamped_gated_activation(gate, up), gate, up)
        return r.linear(f"{name}.down", act)

    def clamped_gated_activation(self, gate: Tensor, up: Tensor) -> Tensor:
        """Bound gate from above, and up on both sides."""
        assert self.gate_bound is not None, "set from the config"
        low = torch.minimum(gate, torch.full_like(gate, self.gate_bound))
        bounded = up.clamp(-self.gate_bound, self.gate_bound)
        return (bounded + 1) * low / (1 + torch.exp(-self.alpha * low))


def decode_e2m1(codes: Tensor) -> Tensor:
    """Return the numbers of 4 bits: a sign, two of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = codes // 8, codes // 2 % 4, codes % 2
    subnormal = mantissa * 0.5
    normal = (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return torch.where(exponent == 0, subnormal, normal) * (1 - 2 * sign)


REFERENCE = GptOssReference
