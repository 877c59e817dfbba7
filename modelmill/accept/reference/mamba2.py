"""mamba2, and the recurrence that hybrids of it share (arXiv:2405.21060, sections 2.1 and 7).

Token by token, with a scalar A for each head and a matrix h [N, P]:

    h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_tᵀ,    y_t = C_tᵀ h_t + D x_t

behind a causal convolution of x, B and C with SiLU; y is gated by silu(z), then normed in groups.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.causal_convolution import causal_convolution
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.tensor_source import TensorSource

NAME_PREFIX = "backbone."
SMALL_TIME_STEP_RANGE, LARGE_TIME_STEP_RANGE = (1e-4, 2e-2), (20.0, 100.0)
"""Δ beyond those of a text."""


class Mamba2Mixin(PlainDecoderReference):
    """A decoder with such a recurrence.

    Attributes:
        ssm_heads, ssm_dim, ssm_state, ssm_groups: its sizes.
        ssm_bias, conv_bias: whether the projections, and the convolution, have a bias.
    """

    ssm_heads: int
    ssm_dim: int
    ssm_state: int
    ssm_groups: int
    ssm_bias: bool
    conv_bias: bool

    @property
    def time_step_limits(self) -> tuple[float, float]:
        """Return the least and the largest Δ."""
        low, high = self.config.get("time_step_limit") or (0.0, float("inf"))
        return float(low), float(high)

    def ssm_weights(self, stem: str) -> LayerWeights:
        """Read a recurrence; the rows of its projection are z, x, B, C and dt."""
        get = self.source.get
        inner, shared = self.ssm_heads * self.ssm_dim, self.ssm_groups * self.ssm_state
        sizes = [inner, inner, shared, shared, self.ssm_heads]
        rows = get(f"{stem}.in_proj.weight").split(sizes)
        biases: Any = [None] * len(sizes)
        if self.ssm_bias:
            biases = get(f"{stem}.in_proj.bias").split(sizes)
        names = ("z", "x", "B", "C", "dt")
        weights = {n: ModuleWeights(w, b) for n, w, b in zip(names, rows, biases, strict=True)}
        for name in ("A_log", "D", "dt_bias"):
            weights[name] = ModuleWeights(get(f"{stem}.{name}"))
        bias = get(f"{stem}.conv1d.bias") if self.conv_bias else None
        weights["conv"] = ModuleWeights(get(f"{stem}.conv1d.weight")[:, 0], bias)
        return weights | self.ssm_output_weights(stem)

    def ssm_output_weights(self, stem: str) -> LayerWeights:
        """Read the norm behind the gate, and the output projection."""
        norm = ModuleWeights(self.source.get(f"{stem}.norm.weight"))
        return {
            "gated_norm": norm, "o_proj": self.read_linear(f"{stem}.out_proj", self.ssm_bias)
        }  # fmt: skip

    def run_ssm_mixer(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run a layer's recurrence with its output projection."""
        return r.linear("o_proj", self.run_gated_ssm(r, normed))

    def run_gated_ssm(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run a layer's recurrence up to its output projection."""
        z, x, b, c, dt = (r.linear(name, normed) for name in ("z", "x", "B", "C", "dt"))
        mixed = self.causal_conv_and_silu(r, torch.cat((x, b, c), -1))
        return self.gate_ssm_output(r, self.ssm_scan(r, mixed, dt), z)

    def gate_ssm_output(self, r: LayerRecorder, y: Tensor, z: Tensor) -> Tensor:
        """Gate a recurrence's output by z, then norm it in groups."""
        gated = (y * F.silu(z)).reshape(len(y), self.ssm_groups, -1)
        normal = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        out = normal.reshape(y.shape) * r.weights["gated_norm"].weight
        return r.record("gated_norm", out, y, z)

    def causal_conv_and_silu(self, r: LayerRecorder, x: Tensor) -> Tensor:
        """Convolve each channel with its weights over the tokens before, then SiLU."""
        weight, bias, _ = r.weights["conv"]
        return r.record("conv", F.silu(causal_convolution(r, x, weight, bias)), x)

    def ssm_scan(self, r: LayerRecorder, mixed: Tensor, dt: Tensor) -> Tensor:
        """Run the recurrence over x, B, C and the steps [T, heads]."""
        inner, shared = self.ssm_heads * self.ssm_dim, self.ssm_groups * self.ssm_state
        x, b, c = mixed.split([inner, shared, shared], -1)
        x = x.reshape(len(x), self.ssm_heads, self.ssm_dim)
        group = self.ssm_heads // self.ssm_groups
        b, c = (
            each.reshape(len(x), self.ssm_groups, -1).repeat_interleave(group, 1) for each in (b, c)
        )
        delta = F.softplus(dt + r.weights["dt_bias"].weight).clamp(*self.time_step_limits)
        decay = torch.exp(-r.weights["A_log"].weight.exp() * delta)
        h = x.new_zeros(self.ssm_heads, self.ssm_state, self.ssm_dim)
        y = torch.empty_like(x)
        for t in range(len(x)):
            h = decay[t, :, None, None] * h
            h = h + delta[t, :, None, None] * b[t, :, :, None] * x[t, :, None, :]
            y[t] = (c[t, :, None, :] @ h)[:, 0] + r.weights["D"].weight[:, None] * x[t]
        r.record("ssm_state", h.transpose(1, 2).reshape(1, -1), mixed, dt)
        return r.record("ssm", y.reshape(len(x), -1), mixed, dt)

    @torch.no_grad()
    def scan_extreme_time_steps(
        self, index: int, mixed: Tensor, dtype: torch.dtype
    ) -> list[tuple[Tensor, Tensor]]:
        """Return steps, and states behind them, of Δ mostly beyond the least, and the largest.

        Without a limit they are smaller, or larger, than a text's.
        """
        low, high = self.time_step_limits
        ranges = [
            (low / 8, low * 1.5) if low > 0 else SMALL_TIME_STEP_RANGE,
            (high / 1.5, high * 8) if math.isfinite(high) else LARGE_TIME_STEP_RANGE,
        ]
        r = LayerRecorder(self.layer_weights(index))
        bias = r.weights["dt_bias"].weight
        draw = torch.rand(len(mixed), len(bias), generator=torch.Generator().manual_seed(17))
        pairs = []
        for first, last in ranges:
            delta = first * (last / first) ** draw.to(bias)
            steps = (delta + torch.log(-torch.expm1(-delta)) - bias).to(dtype).to(bias)
            self.ssm_scan(r, mixed, steps)
            pairs.append((steps, r.trace["ssm_state"].output))
        return pairs


class Mamba2Reference(Mamba2Mixin):
    """Mamba2ForCausalLM: x + M(norm(x)) in every layer."""

    EMBEDDING = "backbone.embeddings.weight"
    FINAL_NORM = "backbone.norm_f"
    LAYERS = "backbone.layers"
    EPS_KEY = "layer_norm_epsilon"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        self.ssm_heads = int(config.get("num_heads", 128))
        super().__init__(source, config | {"num_attention_heads": self.ssm_heads})
        self.ssm_dim = int(config.get("head_dim", 64))
        self.ssm_state = int(config.get("state_size", 128))
        self.ssm_groups = int(config.get("n_groups", 8))
        self.ssm_bias = bool(config.get("use_bias", False))
        self.conv_bias = bool(config.get("use_conv_bias", True))
        self.norm_paths = {"input_norm": "norm"}
        self.layer = self.mixer_only_layer

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's recurrence."""
        return self.ssm_weights(f"{self.LAYERS}.{index}.mixer")

    def mixer_only_layer(self, index: int, r: LayerRecorder, x: Tensor, prompt_length: int) -> None:
        """X + M(norm(x))."""
        del index, prompt_length
        branch = self.run_ssm_mixer(r, self.apply_and_record_norm(r, "input_norm", x))
        r.record("output", x + branch, x, branch)


REFERENCE = Mamba2Reference
