"""SAM's plain ViT encoder: windows in most layers, the whole image in a few (Li et al.

2022, arXiv:2203.16527).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.conv import Conv2d, LayerNorm2d
from modelmill.nn.layer_spec import LayerSpec
from modelmill.nn.linear import Linear
from modelmill.nn.vision_context import VisionContext
from modelmill.nn.vit import VitBlock, VitBranch, VitMLP, patchify, run_blocks, vit_block_spec
from modelmill.ops.image_attention import ImageAttentionInputs
from modelmill.ops.quant_types import QuantizedInput

REFERENCE_MODULE_NAMES = {
    "norm1": "norm1",
    "attn.qkv": "attn.qkv",
    "attn.proj": "attn.proj",
    "attn": "attn",
    "norm2": "norm2",
    "mlp.lin1": "mlp.lin1",
    "mlp.lin2": "mlp.lin2",
    "mlp": "mlp",
}
"""Module of a block → its name in the acceptance reference (accept/reference)."""
MLP_LINEAR_NAMES = ("lin1", "lin2")  # the linear layers of its MLP
REL_POS_TENSORS = ("rel_pos_h", "rel_pos_w")  # tables of relative positions


@dataclass(frozen=True)
class SamVitSpec:
    """Sizes of SAM's ViT.

    Attributes:
        global_attn_indexes: Layers that attend to the whole image; the others attend to windows of
            ``window`` tokens a side.
        rel_pos_rows: Rows of those layers' tables of relative positions, where they were made for
            another image size.
    """

    width: int
    depth: int
    heads: int
    global_attn_indexes: tuple[int, ...]
    inner: int
    out: int = 256
    image: int = 1024
    patch: int = 16
    window: int = 14
    eps: float = 1e-6
    rel_pos_rows: int | None = None

    @property
    def tokens_per_side(self) -> int:
        """Number of tokens along one side of the image."""
        return self.image // self.patch

    @property
    def block_spec(self) -> LayerSpec:
        """What a block is made of."""
        return vit_block_spec(
            self.width, self.inner, MLP_LINEAR_NAMES, REFERENCE_MODULE_NAMES, REL_POS_TENSORS
        )


class SamPatchEmbed(nn.Module):
    """The image cut into patches, each made a token."""

    def __init__(self, spec: SamVitSpec) -> None:
        super().__init__()
        self.proj = Conv2d(3, spec.width, spec.patch, stride=spec.patch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 3, S, S] → [B, H, W, C]."""
        return F.linear(patchify(x, self.proj.stride), self.proj.weight.flatten(1), self.proj.bias)


class SamVitAttention(VitBranch):
    """qkv → scores with relative positions → output projection."""

    rel_pos_h: torch.Tensor
    rel_pos_w: torch.Tensor

    def __init__(self, spec: SamVitSpec, window: int | None) -> None:
        super().__init__()
        self.heads, self.window = spec.heads, window
        self.qkv = Linear(spec.width, 3 * spec.width, bias=True)
        self.proj = Linear(spec.width, spec.width, bias=True)
        rows = (
            2 * window - 1
            if window is not None
            else spec.rel_pos_rows or 2 * spec.tokens_per_side - 1
        )
        for name in REL_POS_TENSORS:
            self.register_buffer(name, torch.empty(rows, spec.width // spec.heads, device="meta"))

    @property
    def input_proj(self) -> Linear:
        return self.qkv

    def forward(self, x: torch.Tensor | QuantizedInput, vision: VisionContext) -> torch.Tensor:
        """[B, H, W, C], the same shape.

        Windows over the edge are padded with zeros after the norm, so that q, k and v of those
        tokens are the bias.
        """
        qkv = vision.apply_linear(self.qkv, x)
        batch, height, width, channels = qkv.shape
        qkv = qkv.view(batch, height, width, 3, self.heads, channels // (3 * self.heads))
        assert self.qkv.bias is not None
        tall, wide = (height, width) if self.window is None else (self.window, self.window)
        inputs = ImageAttentionInputs(
            qkv, self.heads, self.window, self.qkv.bias.view(3, self.heads, -1),
            resize_rel_pos(self.rel_pos_h, 2 * tall - 1),
            resize_rel_pos(self.rel_pos_w, 2 * wide - 1),
        )  # fmt: skip
        mixed = vision.ops.image_attention(inputs)
        return vision.apply_linear(self.proj, mixed)


class SamVitEncoder(nn.Module):
    """An image to its embedding."""

    stack = "blocks"
    pos_embed: torch.Tensor

    def __init__(self, spec: SamVitSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embed = SamPatchEmbed(spec)
        self.register_buffer(
            "pos_embed",
            torch.empty(1, spec.tokens_per_side, spec.tokens_per_side, spec.width, device="meta"),
        )
        windows = [
            None if index in spec.global_attn_indexes else spec.window
            for index in range(spec.depth)
        ]
        self.blocks = nn.ModuleList(
            VitBlock(
                spec.block_spec,
                spec.width,
                spec.eps,
                SamVitAttention(spec, window),
                VitMLP(spec.width, spec.inner, *MLP_LINEAR_NAMES),
            )
            for window in windows
        )
        self.neck = make_neck(spec.width, spec.out)

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[B, 3, S, S] → [B, 256, S/16, S/16]."""
        x = run_blocks(self.blocks, self.patch_embed(x) + self.pos_embed, vision)
        return self.neck(x.permute(0, 3, 1, 2))


def make_neck(width: int, out: int) -> nn.Sequential:
    """To 256 channels: 1×1, norm, 3×3, norm."""
    return nn.Sequential(
        Conv2d(width, out, 1, bias=False),
        LayerNorm2d(out),
        Conv2d(out, out, 3, padding=1, bias=False),
        LayerNorm2d(out),
    )


def resize_rel_pos(table: torch.Tensor, length: int) -> torch.Tensor:
    """A table of relative positions for another size, linearly interpolated.

    [L, D] → [length, D].
    """
    if table.shape[0] == length:
        return table
    wide = F.interpolate(table.float().t()[None], size=length, mode="linear")[0].t()
    return wide.to(table.dtype)
