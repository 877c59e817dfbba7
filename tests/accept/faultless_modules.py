"""What an engine without faults computes in a dtype and recipe: each module rounded as hardware
would.

Rounding is the worst of the usual choices: sine and cosine in the activation's dtype, softmax
weights cast
before they meet the values, int8 weights widened to the dtype before the product, every result
cast. In
float32 only the order of summation and the last bit of the rotation's frequencies differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from modelmill.accept.error_metrics import ErrorMetrics, compare_tensors
from modelmill.accept.reference import LayerTrace, LayerWeights, ModuleWeights, ReferenceModel
from modelmill.accept.reference.decoder import DecoderReference

PROJECTIONS = ("q", "k", "v", "o_proj", "gate", "up", "fc", "down")


def fake_quantize_int8(weight: Tensor) -> Tensor:
    """Weight-only int8, symmetric, one scale per row, and back."""
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


class FaultlessModules:
    """The modules of one reference in ``dtype`` and ``recipe`` ("none", "int8")."""

    def __init__(self, reference: ReferenceModel, dtype: torch.dtype, recipe: str) -> None:
        self.reference, self.dtype, self.recipe = reference, dtype, recipe

    def linear(self, x: Tensor, weights: ModuleWeights) -> Tensor:
        weight = fake_quantize_int8(weights.weight) if self.recipe == "int8" else weights.weight
        bias = None if weights.bias is None else weights.bias.to(self.dtype)
        if self.dtype == torch.float32:
            y = sum(a @ b.T for a, b in zip(x.split(32, -1), weight.split(32, -1), strict=True))
            return y if bias is None else y + bias
        return F.linear(x, weight.to(self.dtype), bias)

    def norm(self, x: Tensor, weights: ModuleWeights, eps: float) -> Tensor:
        # Channels reversed and back: another order of summation.
        plain = self.reference.apply_norm(
            x.float().flip(-1), ModuleWeights(torch.ones_like(weights.weight)), eps
        ).flip(-1)
        y = plain.to(self.dtype) * weights.weight.to(self.dtype)
        return y if weights.bias is None else y + weights.bias.to(self.dtype)

    def apply_rope(self, flat: Tensor, weights: LayerWeights, name: str, prompt: int) -> Tensor:
        reference = self.reference
        assert isinstance(reference, DecoderReference)
        x = flat.reshape(flat.shape[0], -1, reference.head_dim)
        if f"{name}_norm" in weights:
            x = self.norm(x, weights[f"{name}_norm"], reference.eps)
        # The table from a frequency off by one unit in the last place: what another pow() gives.
        cos, sin = reference.rope_for_prompt_length(prompt).cos_sin(
            x.shape[0], prompt, torch.float32
        )
        place = torch.arange(x.shape[0], dtype=torch.float64)[:, None]
        off = place * (1 + 2.0**-23)
        rates = (
            reference.rope_for_prompt_length(prompt)
            .frequencies(x.shape[0], prompt, torch.float32)
            .double()
        )
        gain = reference.rope_for_prompt_length(prompt).attention_factor()
        cos, sin = (
            ((off * rates).cos() * gain).to(self.dtype),
            ((off * rates).sin() * gain).to(self.dtype),
        )
        half = cos.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = cos[:, None], sin[:, None]
        y = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
        scale = reference.query_scaling_by_position(x.shape[0])
        if name == "q" and scale is not None:
            y = y * scale.to(self.dtype)[:, None, None]
        return y.reshape(flat.shape[0], -1)

    def attention(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        reference = self.reference
        dim = getattr(reference, "head_dim", None) or q.shape[1] // reference.num_heads
        heads = [t.reshape(t.shape[0], -1, dim).transpose(0, 1) for t in (q, k, v)]
        group = heads[0].shape[0] // heads[1].shape[0]
        keys, values = (t.repeat_interleave(group, 0) for t in heads[1:])
        scores = ((heads[0] * dim**-0.5) @ keys.transpose(1, 2)).float()
        row = torch.arange(q.shape[0])
        hidden = row[None, :] > row[:, None]
        window = reference.windows[index] if isinstance(reference, DecoderReference) else None
        if window is not None:
            hidden |= row[None, :] <= row[:, None] - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(self.dtype)
        mixed = weights.flip(-1) @ values.flip(-2)  # another order of summation
        return mixed.transpose(0, 1).reshape(q.shape[0], -1)

    def module(
        self, index: int, weights: LayerWeights, name: str, inputs: tuple[Tensor, ...]
    ) -> Tensor:
        """One module's output on these inputs, cast to the dtype first."""
        x = [tensor.to(self.dtype) for tensor in inputs]
        if name in PROJECTIONS:
            return self.linear(x[0], weights[name])
        if name in ("input_norm", "mlp_norm"):
            return self.norm(x[0], weights[name], self.reference.eps)
        if name in ("q_rot", "k_rot"):
            if self.reference.rope is None:
                return x[0]
            return self.apply_rope(x[0], weights, name[0], x[0].shape[0])
        if name == "attn":
            return self.attention(index, x[0], x[1], x[2])
        if name == "act":
            active = self.reference.activation(x[0])
            return active * x[1] if len(x) == 2 else active
        return x[0] + x[1]

    def module_errors(
        self, index: int, weights: LayerWeights, trace: LayerTrace
    ) -> Iterator[tuple[str, ErrorMetrics]]:
        """Module-local errors: every module on the reference's own inputs."""
        for name, (inputs, output, _) in trace.items():
            yield name, compare_tensors(name, self.module(index, weights, name, inputs), output)

    def layer(self, index: int, weights: LayerWeights, x: Tensor, plan: LayerTrace) -> Tensor:
        """The layer's output from our own x: the plan tells which recorded tensor feeds which
        module.
        """
        made: dict[int, Tensor] = {id(plan["input_norm"].inputs[0]): x}
        for name, (inputs, output, _) in plan.items():
            fed = tuple(made[id(tensor)] for tensor in inputs)
            made[id(output)] = self.module(index, weights, name, fed)
        return made[id(plan["output"].output)]

    def head(self, x: Tensor) -> Tensor:
        reference = self.reference
        normed = self.norm(
            x.to(self.dtype), reference.norm_weights(None, "final_norm"), reference.eps
        )
        weight = reference.source.get(reference.head_weight_name())
        return self.linear(normed, ModuleWeights(weight))


def arithmetic_of(name: str) -> str:
    """The arithmetic of a reference's output, by its name."""
    if name in (*PROJECTIONS, "logits"):
        return "linear"
    others = {"q_rot": "rotary", "k_rot": "rotary", "attn": "attention", "act": "activation"}
    others["embed"] = "embedding"
    return others.get(name, "norm" if name.endswith("norm") else "residual")
