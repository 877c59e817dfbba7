"""Convolutions and what stands between them in image models; images are [B, C, H, W]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


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
        if self.up:
            return F.conv_transpose2d(x, self.weight, self.bias, self.stride, self.pad, groups=self.groups)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.pad, groups=self.groups)


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
        wide = x.float()
        mean = wide.mean(1, keepdim=True)
        centred = wide - mean
        spread = (centred * centred).mean(1, keepdim=True)
        normed = centred * torch.rsqrt(spread + self.eps)
        return (normed * self.weight.float()[:, None, None] + self.bias.float()[:, None, None]).to(x.dtype)


class PlainNorm(nn.Module):
    """LayerNorm over the last dimension, without a residual to carry."""

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
