"""Convolutions and what stands between them in image models; images are [B, C, H, W]."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.norm import AffineNorm
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.add_layer_norm_quant import AddLayerNormQuantInputs
from modelmill.ops.quant_types import QuantizedInput


class Conv2d(nn.Module):
    """A convolution; with ``transposed`` the transposed one, whose stride enlarges."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = True,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.stride = stride
        self.padding = padding
        self.groups = groups
        self.transposed = transposed
        shape = (
            (in_channels, out_channels // groups, kernel_size, kernel_size)
            if transposed
            else (out_channels, in_channels // groups, kernel_size, kernel_size)
        )
        self.register_buffer("weight", torch.empty(shape, device="meta"))
        self.register_buffer("bias", torch.empty(out_channels, device="meta") if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, inner, H, W] → [B, outer, H', W']."""
        if x.is_cuda and x.dtype is torch.float32:
            with _disable_tf32():
                return self._convolve(x)
        return self._convolve(x)

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        if self.transposed:
            return F.conv_transpose2d(
                x, self.weight, self.bias, self.stride, self.padding, groups=self.groups
            )
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, groups=self.groups)


@contextlib.contextmanager
def _disable_tf32() -> Iterator[None]:
    """Within the block, cuDNN computes float32 in float32.

    By default it rounds to TF32, whose errors (3e-4) acceptance refuses.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class LayerNorm2d(AffineNorm):
    """LayerNorm over the channels of each pixel, statistics in float32."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W], the same shape."""
        by_pixel = x.permute(0, 2, 3, 1)
        normed = F.layer_norm(by_pixel, by_pixel.shape[-1:], self.weight, self.bias, self.eps)
        return normed.permute(0, 3, 1, 2)


class VisionLayerNorm(AffineNorm):
    """LayerNorm over the last dimension; ``add_norm`` also adds what the stream still lacks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, C], the same shape."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)

    def add_norm(
        self,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        next_linear: Linear,
        vision: VisionContext,
    ) -> tuple[torch.Tensor | QuantizedInput, torch.Tensor]:
        """Add and normalise in one op where there is one.

        Returns:
            The norm of x + branch in the format that ``next_linear`` takes, and x + branch; a
                branch of None adds nothing.
        """
        ops, act_quant = vision.ops, vision.act_quant(next_linear)
        if branch is None:
            normed = self._norm(ops.layer_norm, x, self.weight, self.bias, self.eps)
            if act_quant is None:
                return normed, x
            values, scale = next_linear.weight.run_bound_op(ops.quantize, normed, act_quant)
            return QuantizedInput(values, scale, x.dtype), x
        if act_quant is None:
            return self._add_norm(ops.add_layer_norm, branch, x, self.weight, self.bias, self.eps)
        inputs = AddLayerNormQuantInputs(
            branch, x, self.weight, self.bias, self.eps, act_quant.dtype, act_quant.inv_scale
        )
        values, scale, total = self._add_norm(ops.add_layer_norm_quant, inputs)
        return QuantizedInput(values, scale, x.dtype), total
