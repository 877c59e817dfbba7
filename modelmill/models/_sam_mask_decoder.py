"""SAM's mask decoder: two-way attention of tokens and image, then masks of the upsampled image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.models._sam_prompt_encoder import SamEmbedding
from modelmill.nn.conv import Conv2d, LayerNorm2d, VisionLayerNorm
from modelmill.nn.linear import Linear
from modelmill.nn.vision_context import VisionContext

NORM_EPS = 1e-5
NUM_MASK_TOKENS = 4  # the single mask and the three of an ambiguous prompt


class SamAttention(nn.Module):
    """Plain attention of one set of tokens to another, inside a narrower space."""

    def __init__(self, width: int, heads: int, downsample_rate: int = 1) -> None:
        super().__init__()
        inner = width // downsample_rate
        self.heads = heads
        self.q_proj = Linear(width, inner, bias=True)
        self.k_proj = Linear(width, inner, bias=True)
        self.v_proj = Linear(width, inner, bias=True)
        self.out_proj = Linear(inner, width, bias=True)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, vision: VisionContext
    ) -> torch.Tensor:
        """[N, Q, C], [N, K, C], [N, K, C] → [N, Q, C].

        What all prompts share, q or k and v, may have an N of 1.
        """
        q, k, v = (
            self._split_heads(vision.apply_linear(layer, x))
            for layer, x in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
        )
        if len(q) > len(k):  # the same keys for all: queries of all prompts are queries of one
            count, heads, length, dim = q.shape
            mixed = _attend(q.transpose(0, 1).reshape(1, heads, count * length, dim), k, v)
            mixed = mixed.view(heads, count, length, dim).transpose(0, 1)
        else:
            mixed = _attend(q.expand(len(k), -1, -1, -1), k, v)
        return vision.apply_linear(self.out_proj, mixed.transpose(1, 2).flatten(2))

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / √D) v of [N, heads, Q, D], [N, heads, K, D]; N of q and k may be 1."""
    if 8 * q.shape[2] > k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v)
    # few queries, many keys: a fused kernel would be as few programs as there are heads
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
    return scores.softmax(-1) @ v


class SamTokenMLP(nn.Module):
    """Feed-forward block of the mask tokens: down(relu(up(x)))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.lin1 = Linear(width, inner, bias=True)
        self.lin2 = Linear(inner, width, bias=True)

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[…, C], the same shape."""
        return vision.apply_linear(self.lin2, torch.relu(vision.apply_linear(self.lin1, x)))


class TwoWayAttentionBlock(nn.Module):
    """Self-attention of the tokens, tokens to image, MLP, image to tokens; a norm after each."""

    def __init__(self, width: int, heads: int, inner: int, first: bool) -> None:
        super().__init__()
        self.skip_first_residual = first
        self.self_attn = SamAttention(width, heads)
        self.norm1 = VisionLayerNorm(width, NORM_EPS)
        self.cross_attn_token_to_image = SamAttention(width, heads, 2)
        self.norm2 = VisionLayerNorm(width, NORM_EPS)
        self.mlp = SamTokenMLP(width, inner)
        self.norm3 = VisionLayerNorm(width, NORM_EPS)
        self.cross_attn_image_to_token = SamAttention(width, heads, 2)
        self.norm4 = VisionLayerNorm(width, NORM_EPS)

    def forward(
        self,
        tokens: torch.Tensor,
        image: torch.Tensor,
        query_pe: torch.Tensor,
        image_pe: torch.Tensor,
        vision: VisionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend both ways.

        Args:
            tokens: [N, T, C].
            image: [N or 1, P, C].
            query_pe: The tokens as they entered the decoder, [N, T, C].
            image_pe: Positions of the image, [P, C].
            vision: The ops.
        """
        if self.skip_first_residual:  # neither positions nor a residual
            tokens = self.self_attn(tokens, tokens, tokens, vision)
        else:
            at = tokens + query_pe
            tokens = tokens + self.self_attn(at, at, tokens, vision)
        tokens = self.norm1(tokens)
        placed = image + image_pe
        tokens = self.norm2(
            tokens + self.cross_attn_token_to_image(tokens + query_pe, placed, image, vision)
        )
        tokens = self.norm3(tokens + self.mlp(tokens, vision))
        image = image + self.cross_attn_image_to_token(placed, tokens + query_pe, tokens, vision)
        image = vision.ops.layer_norm(image, self.norm4.weight, self.norm4.bias, self.norm4.eps)
        return tokens, image


class TwoWayTransformer(nn.Module):
    """Two rounds, and a last look of the tokens at the image."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TwoWayAttentionBlock(width, heads, inner, first=i == 0) for i in range(2)
        )
        self.final_attn_token_to_image = SamAttention(width, heads, 2)
        self.norm_final_attn = VisionLayerNorm(width, NORM_EPS)

    def forward(
        self,
        image: torch.Tensor,
        image_pe: torch.Tensor,
        query_pe: torch.Tensor,
        vision: VisionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Image [N or 1, P, C], image_pe [P, C], query_pe [N, T, C] → tokens, image [N, P, C]."""
        tokens = query_pe
        for layer in self.layers:
            tokens, image = layer(tokens, image, query_pe, image_pe, vision)
        tokens = tokens + self.final_attn_token_to_image(
            tokens + query_pe, image + image_pe, image, vision
        )
        return self.norm_final_attn(tokens), image


class SamFeedForward(nn.Module):
    """Three linear layers with ReLU between them."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        sizes = ((width, width), (width, width), (width, out))
        self.layers = nn.ModuleList(Linear(a, b, bias=True) for a, b in sizes)

    def forward(self, x: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[N, C] → [N, out]."""
        first, second, third = self.layers
        x = torch.relu(vision.apply_linear(first, x))  # type: ignore[arg-type]
        x = torch.relu(vision.apply_linear(second, x))  # type: ignore[arg-type]
        return vision.apply_linear(third, x)  # type: ignore[arg-type]


class SamMaskDecoder(nn.Module):
    """Embeddings of an image and of prompts to mask logits and predicted IoUs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transformer = TwoWayTransformer(width, heads=8, inner=2048)
        self.iou_token = SamEmbedding(1, width)
        self.mask_tokens = SamEmbedding(NUM_MASK_TOKENS, width)
        self.output_upscaling = nn.ModuleDict(
            {
                "0": Conv2d(width, width // 4, 2, stride=2, transposed=True),
                "1": LayerNorm2d(width // 4),
                "3": Conv2d(width // 4, width // 8, 2, stride=2, transposed=True),
            }
        )
        self.output_hypernetworks_mlps = nn.ModuleList(
            SamFeedForward(width, width // 8) for _ in range(NUM_MASK_TOKENS)
        )
        self.iou_prediction_head = SamFeedForward(width, NUM_MASK_TOKENS)

    def forward(
        self,
        image: torch.Tensor,
        image_pe: torch.Tensor,
        sparse: torch.Tensor,
        dense: torch.Tensor,
        vision: VisionContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode masks of one image for N prompts.

        Args:
            image: [N or 1, C, G, G].
            image_pe: [C, G, G].
            sparse: Point and box embeddings, [N, P, C].
            dense: Mask embeddings, [N or 1, C, G, G].
            vision: The ops.

        Returns:
            All four masks' logits [N, 4, 4·G, 4·G] and their predicted IoUs [N, 4], both float32.
        """
        count, side = len(sparse), dense.shape[-1]
        own = torch.cat((self.iou_token.weight, self.mask_tokens.weight))
        tokens = torch.cat((own.expand(count, -1, -1), sparse.to(own.dtype)), 1)
        if not dense.stride(0):
            dense = dense[:1]  # the same for all
        source = (image + dense).flatten(2).transpose(1, 2).contiguous()
        at = image_pe.to(own.dtype).flatten(1).t()
        tokens, source = self.transformer(source, at, tokens, vision)
        makers = [
            make(tokens[:, 1 + i], vision) for i, make in enumerate(self.output_hypernetworks_mlps)
        ]
        masks = self._upscale_image(source, vision) @ torch.stack(makers, 2).float()
        # what became of one token lies together, by row, column, half and half of a half
        parts = masks.view(count, side, side, 2, 2, 2, 2, NUM_MASK_TOKENS).permute(
            0, 7, 1, 3, 5, 2, 4, 6
        )
        scores = self.iou_prediction_head(tokens[:, 0], vision)
        return parts.reshape(count, NUM_MASK_TOKENS, 4 * side, 4 * side), scores.float()

    def _upscale_image(self, image: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[N, P, C] → [N, 16·P, C / 8] float32: each token becomes 2 × 2, each of those again.

        A transposed convolution whose parts do not overlap is a product of each token with all of
        them.
        """
        first, norm, second = (self.output_upscaling[name] for name in ("0", "1", "3"))
        assert isinstance(first, Conv2d)
        assert isinstance(norm, LayerNorm2d)
        assert isinstance(second, Conv2d)
        x = _upsample_2x(image, first, vision).unflatten(-1, (4, -1))
        x = F.gelu(vision.ops.layer_norm(x, norm.weight, norm.bias, norm.eps))
        return (
            F.gelu(_upsample_2x(x, second, vision))
            .view(len(image), 16 * image.shape[1], -1)
            .float()
        )


def _upsample_2x(x: torch.Tensor, conv: Conv2d, vision: VisionContext) -> torch.Tensor:
    """[…, C] → […, 4·out] of a transposed convolution of 2 × 2 with stride 2.

    The four outputs are upper left, upper right, lower left, lower right.
    """
    weight = conv.weight.permute(2, 3, 1, 0).flatten(0, 2)
    assert conv.bias is not None
    return vision.ops.linear(x.reshape(-1, x.shape[-1]), weight, conv.bias.repeat(4)).view(
        *x.shape[:-1], -1
    )
