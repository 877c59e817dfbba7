"""What the vision transformers share: patches, blocks of attention and MLP, and the stream that runs through them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from modelmill.nn.conv import PlainNorm
from modelmill.nn.linear import Linear
from modelmill.nn.still import Still
from modelmill.ops.eight_bit import Quantized


class Branch(nn.Module):
    """What a block adds to its stream: attention, or an MLP."""

    @property
    def first(self) -> Linear:
        """The product that reads the normed stream; it says in which form."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor | Quantized, still: Still) -> torch.Tensor:
        """[…, C], the same shape, in floating point."""
        raise NotImplementedError


class Block(nn.Module):
    """norm → attention → add, norm → MLP → add."""

    def __init__(self, width: int, eps: float, attn: Branch, mlp: Branch) -> None:
        super().__init__()
        self.norm1 = PlainNorm(width, eps)
        self.attn = attn
        self.norm2 = PlainNorm(width, eps)
        self.mlp = mlp

    def forward(self, x: torch.Tensor, still: Still) -> torch.Tensor:
        """[B, …, C], the same shape."""
        x, branch = self.flow(x, None, still)
        return x + branch

    def flow(self, x: torch.Tensor, branch: torch.Tensor | None, still: Still) -> tuple[torch.Tensor, torch.Tensor]:
        """x: what the stream holds, and the branch that is still to be added to it. Returns the next of both.

        A norm reads what the addition before it writes, so one op does both.
        """
        normed, x = self.norm1.added(x, branch, self.attn.first, still)
        normed, x = self.norm2.added(x, self.attn(normed, still), self.mlp.first, still)
        return x, self.mlp(normed, still)


def through(blocks: Iterable[nn.Module], x: torch.Tensor, still: Still) -> torch.Tensor:
    """The stream [B, …, C] behind the last of the blocks."""
    branch: torch.Tensor | None = None
    for block in blocks:
        assert isinstance(block, Block), "blocks are all of one kind"
        x, branch = block.flow(x, branch, still)
    return x if branch is None else x + branch


def patches_of(x: torch.Tensor, side: int) -> torch.Tensor:
    """[B, 3, H, W] → [B, H / side, W / side, 3 · side²], as the weight of a convolution [C, 3, side, side] lies.

    Where it never reads a pixel twice a convolution is a product of these.
    """
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // side, side, width // side, side)
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(3)
