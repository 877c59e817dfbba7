"""The second argument of an image model's modules: the ops; there are no tokens and no cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from modelmill.nn.linear import Linear
from modelmill.ops.quant_types import ActQuantSpec, QuantizedInput
from modelmill.ops.registry import Ops


@dataclass(frozen=True)
class VisionContext:
    """One forward pass over images."""

    ops: Ops = field(repr=False)

    def apply_linear(self, layer: Linear, x: torch.Tensor | QuantizedInput) -> torch.Tensor:
        """[…, K] → […, N] for every weight format; activations may be quantized already."""
        if isinstance(x, QuantizedInput):
            values = x.values.view(-1, x.values.shape[-1])
            flat = QuantizedInput(values, None if x.scale is None else x.scale.view(-1), x.dtype)
            return layer.weight.matmul(flat, layer.bias, self.ops).view(*x.values.shape[:-1], -1)
        wide = x.reshape(-1, x.shape[-1])
        return layer.weight.matmul(wide, layer.bias, self.ops).view(*x.shape[:-1], -1)

    def apply_linear_gelu(
        self, layer: Linear, x: torch.Tensor | QuantizedInput, next_linear: Linear
    ) -> torch.Tensor | QuantizedInput:
        """GELU of the layer's output in the format that ``next_linear`` takes: […, K] → […, N]."""
        fused = self.act_quant(next_linear)
        if fused is not None:
            inner = self.apply_linear(layer, x)
            values, scale = next_linear.weight.run_bound_op(
                self.ops.gelu_quant, inner, fused.dtype, fused.inv_scale
            )
            return QuantizedInput(values, scale, inner.dtype)
        if layer.weight.format == "dense" and isinstance(x, torch.Tensor):
            weight = layer.weight.tensors()["weight"]
            rows = x.reshape(-1, x.shape[-1])
            out = layer.weight.run_bound_op(self.ops.linear_gelu, rows, weight, layer.bias)
            return out.view(*x.shape[:-1], -1)
        return layer.weight.run_bound_op(self.ops.gelu, self.apply_linear(layer, x))

    def act_quant(self, layer: Linear) -> ActQuantSpec | None:
        """The 8-bit input that the op in front should put out.

        None: floating point, or no backend has such an op.
        """
        spec = layer.weight.input_quant_spec
        if spec is None or self.ops.backends["add_layer_norm_quant"] == "torch":
            return None
        plain = spec.zero_point is None and spec.perm is None and spec.bits == 8
        return spec if plain and (spec.inv_scale is None or spec.inv_scale.numel() == 1) else None
