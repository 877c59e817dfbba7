"""falcon_h1: attention and Mamba2 side by side, multipliers of µP (arXiv:2507.22448, section 2).

x + A(norm(x)) + S(norm(x)), then x + M(norm(x)). Factors, by their keys in config.json: what A and
S read and return; the keys; z, x, B, C and dt; the gate in front of its activation, M's output.
Where the recurrence has no norm its output is y · silu(z).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.mamba2 import Mamba2Mixin
from modelmill.accept.reference.plain_decoder import MLP_LINEAR_NAMES, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class FalconH1Reference(Mamba2Mixin):
    """FalconH1ForCausalLM."""

    FINAL_NORM = "model.final_layernorm"
    DEFAULTS = ReferenceDefaults(kv_heads=8, eps=1e-5, positions=8192, theta=10000.0)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.norm_paths["mlp_norm"] = "pre_ff_layernorm"
        for name in MLP_LINEAR_NAMES:
            self.projection_paths[name] = f"feed_forward.{name}_proj"
        self.biased = self.biased_attention_and_mlp_projections()
        self.embedding_scale = self.read_multiplier("embedding")
        self.logit_scale = self.read_multiplier("lm_head")
        inner = config.get("mamba_d_ssm", 1024)
        expanded = int(config.get("mamba_expand", 2)) * self.hidden_size
        self.ssm_heads = int(config.get("mamba_n_heads", 128))
        self.ssm_dim = int(inner or expanded) // self.ssm_heads
        self.ssm_state = int(config.get("mamba_d_state", 256))
        self.ssm_groups = int(config.get("mamba_n_groups", 1))
        self.ssm_bias = bool(config.get("mamba_proj_bias", False))
        self.conv_bias = bool(config.get("mamba_conv_bias", True))
        self.has_norm = bool(config.get("mamba_rms_norm", False))
        self.norm_first = bool(config.get("mamba_norm_before_gate", True))
        self.layer = self.parallel_attention_ssm_layer

    def read_multiplier(self, name: str) -> float:
        """Return a single factor."""
        return float(self.config.get(f"{name}_multiplier", 1.0))

    def layer_weights(self, index: int) -> LayerWeights:
        """Read a layer; a factor of a projection's output or input is one of its rows."""
        weights = super().layer_weights(index)
        before = {name: self.read_multiplier("attention_in") for name in "qkv"}
        after = {"k": self.read_multiplier("key"), "o_proj": self.read_multiplier("attention_out")}
        names = ("z", "x", "B", "C", "dt")
        before |= dict.fromkeys(names, self.read_multiplier("ssm_in"))
        after |= dict(zip(names, self.config.get("ssm_multipliers") or [1.0] * 5, strict=True))
        after["mamba_o_proj"] = self.read_multiplier("ssm_out")
        gate, down = self.config.get("mlp_multipliers") or [1.0, 1.0]
        after |= {"gate": gate, "down": down}
        for name, affine in weights.items():
            reads, returns = before.get(name, 1.0), after.get(name, 1.0)
            bias = None if affine.bias is None else affine.bias * returns
            weights[name] = affine._replace(weight=affine.weight * (reads * returns), bias=bias)
        return weights

    def token_mixer_weights(self, index: int) -> LayerWeights:
        """Read a layer's attention, and the recurrence beside it."""
        return super().token_mixer_weights(index) | self.ssm_weights(f"{self.LAYERS}.{index}.mamba")

    def ssm_output_weights(self, stem: str) -> LayerWeights:
        """Read the norm, if there is one, and the output projection."""
        out = self.read_linear(f"{stem}.out_proj", bool(self.config.get("projectors_bias", False)))
        weights = {"mamba_o_proj": out}
        if self.has_norm:
            weights["gated_norm"] = ModuleWeights(self.source.get(f"{stem}.norm.weight"))
        return weights

    def gate_ssm_output(self, r: LayerRecorder, y: Tensor, z: Tensor) -> Tensor:
        """Gate a recurrence's output by z, with a norm behind the gate, in front of it, or none."""
        if not self.has_norm:
            return r.record("gated_norm", y * F.silu(z), y, z)
        x = y if self.norm_first else y * F.silu(z)
        groups = x.reshape(len(x), self.ssm_groups, -1)
        normal = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        out = normal.reshape(x.shape) * r.weights["gated_norm"].weight
        return r.record("gated_norm", out * F.silu(z) if self.norm_first else out, y, z)

    def parallel_attention_ssm_layer(
        self, index: int, r: LayerRecorder, x: Tensor, prompt_length: int
    ) -> None:
        """X + A(norm(x)) + S(norm(x)), then the MLP."""
        normed = self.apply_and_record_norm(r, "input_norm", x)
        attention = self.run_token_mixer(index, r, normed, prompt_length)
        scanned = r.linear("mamba_o_proj", self.run_gated_ssm(r, normed))
        branch = r.record("branches", attention + scanned, attention, scanned)
        middle = r.record("post_attn_residual", x + branch, x, branch)
        branch = self.mlp(r, self.apply_and_record_norm(r, "mlp_norm", middle))
        r.record("output", middle + branch, middle, branch)


REFERENCE = FalconH1Reference
