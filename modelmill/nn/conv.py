"""Convolutions and what stands between them in image models; images are [B, C, H, W]."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.still import Still
from modelmill.ops.eight_bit import Quantized


class Conv2d(nn.Module):
    """A convolution; with ``up`` the transposed one, whose stride enlarges."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, inner: int, outer: int, size: int, *, stride: int = 1, pad: int = 0, groups: int = 1,
        bias: bool = True, up: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stride, self.pad, self.groups, self.up = stride, pad, groups, up
        shape = (inner, outer // groups, size, size) if up else (outer, inner // groups, size, size)
        self.register_buffer("weight", torch.empty(shape, device="meta"))
        self.register_buffer("bias", torch.empty(outer, device="meta") if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, inner, H, W] → [B, outer, H', W']."""
        if x.is_cuda and x.dtype is torch.float32:
            with _whole_floats():
                return self._convolved(x)
        return self._convolved(x)

    def _convolved(self, x: torch.Tensor) -> torch.Tensor:
        if self.up:
            return F.conv_transpose2d(x, self.weight, self.bias, self.stride, self.pad, groups=self.groups)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.pad, groups=self.groups)


@contextlib.contextmanager
def _whole_floats() -> Iterator[None]:
    """Inside, cuDNN computes float32 as float32: else it rounds to TF32, whose errors (3e-4) acceptance refuses."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of each pixel, statistics in float32."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(width, device="meta"))
        self.register_buffer("bias", torch.empty(width, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W], the same shape."""
        by_pixel = x.permute(0, 2, 3, 1)
        normed = F.layer_norm(by_pixel, by_pixel.shape[-1:], self.weight, self.bias, self.eps)
        return normed.permute(0, 3, 1, 2)


class PlainNorm(nn.Module):
    """LayerNorm over the last dimension; ``added`` also adds what the stream still lacks."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(width, device="meta"))
        self.register_buffer("bias", torch.empty(width, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, C], the same shape."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)

    def added(
        self, x: torch.Tensor, branch: torch.Tensor | None, then: Linear, still: Still
    ) -> tuple[torch.Tensor | Quantized, torch.Tensor]:
        """(the norm of x + branch in the form that ``then`` takes, x + branch); branch None: of x."""
        ops, wanted = still.ops, still.wanted(then)
        if branch is None:
            normed = ops.layer_norm(x, self.weight, self.bias, self.eps)
            if wanted is None:
                return normed, x
            return Quantized(*ops.quantize(normed, wanted.kind, wanted.factor), x.dtype), x
        if wanted is None:
            return ops.add_layer_norm(branch, x, self.weight, self.bias, self.eps)
        values, scale, total = ops.add_layer_norm_quant(
            branch, x, self.weight, self.bias, self.eps, wanted.kind, wanted.factor
        )
        return Quantized(values, scale, x.dtype), total
