"""Shared parts of the vision transformers: patches, attention and MLP blocks, the residual."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from modelmill.nn.conv import PlainNorm
from modelmill.nn.linear import Linear
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.quant_types import QuantizedInput


class VitBranch(nn.Module):
    """What a block adds to its stream: attention, or an MLP."""

    @property
    def input_proj(self) -> Linear:
        """The product that reads the normed stream; it says in which form."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor | QuantizedInput, vision: VisionContext) -> torch.Tensor:
        """[…, C], the same shape, in floating point."""
        raise NotImplementedError


class VitBlock(nn.Module):
    """norm → attention → add, norm → MLP → add."""

    def __init__(self, width: int, eps: float, attn: VitBranch, mlp: VitBranch) -> None:
        super().__init__()
        self.norm1 = PlainNorm(width, eps)
        self.attn = attn
        self.norm2 = PlainNorm(width, eps)
        self.mlp = mlp

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[B, …, C], the same shape."""
        x, branch = self.forward_deferred_add(x, None, vision)
        return x + branch

    def forward_deferred_add(
        self, x: torch.Tensor, branch: torch.Tensor | None, vision: VisionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a block whose input is the residual and a branch not yet added to it.

        A norm reads what the addition before it writes, so that one op does both.

        Returns:
            The next residual and branch.
        """
        normed, x = self.norm1.add_norm(x, branch, self.attn.input_proj, vision)
        normed, x = self.norm2.add_norm(x, self.attn(normed, vision), self.mlp.input_proj, vision)
        return x, self.mlp(normed, vision)


def run_blocks(blocks: Iterable[nn.Module], x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
    """The stream [B, …, C] behind the last of the blocks."""
    branch: torch.Tensor | None = None
    for block in blocks:
        assert isinstance(block, VitBlock), "blocks are all of one kind"
        x, branch = block.forward_deferred_add(x, branch, vision)
    return x if branch is None else x + branch


def patchify(x: torch.Tensor, patch_size: int) -> torch.Tensor:
    """[B, 3, H, W] → [B, H / P, W / P, 3 · P²], P the patch size.

    The channels are in the order of a convolution's weight [C, 3, P, P]: without overlap the
    convolution is a GEMM of these rows.
    """
    batch, channels, height, width = x.shape
    parts = x.reshape(
        batch, channels, height // patch_size, patch_size, width // patch_size, patch_size
    )
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(3)
