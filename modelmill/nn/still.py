"""What the modules of an image model need to know besides their input: no tokens, no cache, only the ops."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from modelmill.nn.linear import Linear
from modelmill.ops.eight_bit import Quantized, Wanted
from modelmill.ops.shelf import Ops
from modelmill.weights.held import wanted


@dataclass(frozen=True)
class Still:
    """One forward pass over images."""

    ops: Ops = field(repr=False)

    def linear(self, layer: Linear, x: torch.Tensor | Quantized) -> torch.Tensor:
        """[…, K] → […, N], whatever form the weight is held in, from activations in the form that it wants."""
        if isinstance(x, Quantized):
            values = x.values.view(-1, x.values.shape[-1])
            flat = Quantized(values, None if x.scale is None else x.scale.view(-1), x.dtype)
            return layer.held.matmul(flat, layer.bias, self.ops).view(*x.values.shape[:-1], -1)
        wide = x.reshape(-1, x.shape[-1])
        return layer.held.matmul(wide, layer.bias, self.ops).view(*x.shape[:-1], -1)

    def gelu(self, layer: Linear, x: torch.Tensor | Quantized, then: Linear) -> torch.Tensor | Quantized:
        """gelu(layer(x)) as ``then`` takes it: […, K] → […, N]."""
        fused = self.wanted(then)
        if fused is not None:
            inner = self.linear(layer, x)
            return Quantized(*self.ops.gelu_quant(inner, fused.kind, fused.factor), inner.dtype)
        if layer.held.kind == "dense" and isinstance(x, torch.Tensor):
            weight = layer.held.tensors()["weight"]
            return self.ops.gelu_linear(x.reshape(-1, x.shape[-1]), weight, layer.bias).view(*x.shape[:-1], -1)
        return self.ops.gelu(self.linear(layer, x))

    def wanted(self, layer: Linear) -> Wanted | None:
        """The 8-bit input that the op in front should make at once; None: floating point, or no op makes it faster."""
        found = wanted(layer.held)
        if found is None or self.ops.chosen["add_layer_norm_quant"] == "torch":
            return None
        plain = found.zero is None and found.order is None and found.bits == 8
        return found if plain and (found.factor is None or found.factor.numel() == 1) else None
