"""EVA-CLIP's ViT-g without its last block, the vision encoder of BLIP-2 and MiniGPT-4 (Fang et al.

2022, arXiv:2211.07636).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.models._rename_rules import SourceTensors
from modelmill.nn.conv import Conv2d
from modelmill.nn.layer_spec import LayerSpec
from modelmill.nn.linear import Linear
from modelmill.nn.vision_context import VisionContext
from modelmill.nn.vit import (
    TransformerSizes,
    VitBlock,
    VitBranch,
    VitMLP,
    patchify,
    run_blocks,
    vit_block_spec,
)
from modelmill.ops.image_attention import ImageAttentionInputs
from modelmill.ops.quant_types import QuantizedInput

REFERENCE_MODULE_NAMES = {
    "norm1": "vision_encoder.norm1",
    "attn.qkv": "vision_encoder.qkv",
    "attn.proj": "vision_encoder.proj",
    "attn": "vision_encoder.attn",
    "norm2": "vision_encoder.norm2",
    "mlp.fc1": "vision_encoder.fc1",
    "mlp.fc2": "vision_encoder.fc2",
    "mlp": "vision_encoder.mlp",
    "": "vision_encoder.block",
}
"""Module of a block → its name in the acceptance reference (accept/reference)."""
BLOCK_SOURCES = {"attn.qkv.bias": SourceTensors(("attn.q_bias", "attn.v_bias"), "bias_q0v")}
"""Tensors of a block that the checkpoint has in parts: the keys have no bias."""
MLP_LINEAR_NAMES = ("fc1", "fc2")  # the linear layers of its MLP


@dataclass(frozen=True)
class EvaSpec(TransformerSizes):
    """Sizes of EVA's vision transformer."""

    image: int = 224
    patch: int = 14
    eps: float = 1e-6

    @property
    def tokens_per_side(self) -> int:
        """Number of patches along one side of the image."""
        return self.image // self.patch

    @property
    def block_spec(self) -> LayerSpec:
        """What a block is made of."""
        return vit_block_spec(self.width, self.inner, MLP_LINEAR_NAMES, REFERENCE_MODULE_NAMES)


EVA_G = EvaSpec(1408, 39, 16, 6144)


class EvaAttention(VitBranch):
    """Every token to every token. The keys have no bias: the middle third of qkv's is zero."""

    def __init__(self, spec: EvaSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.qkv = Linear(spec.width, 3 * spec.width, bias=True)
        self.proj = Linear(spec.width, spec.width, bias=True)

    @property
    def input_proj(self) -> Linear:
        return self.qkv

    def forward(self, x: torch.Tensor | QuantizedInput, vision: VisionContext) -> torch.Tensor:
        """[B, T, C], the same shape."""
        qkv = vision.apply_linear(self.qkv, x)
        batch, tokens, width = qkv.shape
        # a picture one token high: no windows, no positions
        qkv = qkv.view(batch, 1, tokens, 3, self.heads, width // (3 * self.heads))
        mixed = vision.ops.image_attention(ImageAttentionInputs(qkv, self.heads, None, None))
        return vision.apply_linear(self.proj, mixed.view(batch, tokens, width // 3))


class EvaPatchEmbed(nn.Module):
    """The image cut into patches, each made a token."""

    def __init__(self, spec: EvaSpec) -> None:
        super().__init__()
        self.proj = Conv2d(3, spec.width, spec.patch, stride=spec.patch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 3, S, S] → [B, T, C]."""
        return F.linear(
            patchify(x, self.proj.stride).flatten(1, 2), self.proj.weight.flatten(1), self.proj.bias
        )


class EvaVisionEncoder(nn.Module):
    """An image to tokens; the first is the class token. There is no norm at the end."""

    cls_token: torch.Tensor
    pos_embed: torch.Tensor

    def __init__(self, spec: EvaSpec) -> None:
        super().__init__()
        self.spec = spec
        self.patch_embed = EvaPatchEmbed(spec)
        self.register_buffer("cls_token", torch.empty(1, 1, spec.width, device="meta"))
        self.register_buffer(
            "pos_embed", torch.empty(1, spec.tokens_per_side**2 + 1, spec.width, device="meta")
        )
        self.blocks = nn.ModuleList(
            VitBlock(
                spec.block_spec,
                spec.width,
                spec.eps,
                EvaAttention(spec),
                VitMLP(spec.width, spec.inner, *MLP_LINEAR_NAMES),
            )
            for _ in range(spec.depth)
        )

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[B, 3, S, S] → [B, 1 + (S / patch)², C]; for another S the positions are interpolated."""
        return run_blocks(self.blocks, self.embed_patches_and_positions(x), vision)

    def embed_patches_and_positions(self, x: torch.Tensor) -> torch.Tensor:
        """What the first block reads: [B, 3, S, S] → [B, 1 + (S / patch)², C]."""
        tokens = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(len(tokens), -1, -1), tokens), 1)
        return x + interpolate_positions(self.pos_embed, tokens.shape[1])


def interpolate_positions(table: torch.Tensor, num_patches: int) -> torch.Tensor:
    """Learned positions [1, 1 + G², C] for a square of ``num_patches`` patches.

    Interpolated (bicubic) where the checkpoint's square has another size.
    """
    grid, side = round((table.shape[1] - 1) ** 0.5), round(num_patches**0.5)
    assert side * side == num_patches, "images are square here"
    if grid == side:
        return table
    square = table[:, 1:].float().view(1, grid, grid, -1).permute(0, 3, 1, 2)
    larger = F.interpolate(square, (side, side), mode="bicubic", align_corners=False)
    return torch.cat(
        (table[:, :1], larger.permute(0, 2, 3, 1).reshape(1, num_patches, -1).to(table.dtype)), 1
    )
