"""SAM's mask decoder: tokens and image attend to each other twice, then masks are read off the enlarged image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.models._sam_prompt import Row
from modelmill.nn.conv import ChannelNorm, Conv2d, PlainNorm
from modelmill.nn.linear import Linear
from modelmill.nn.still import Still

EPS = 1e-5
MASKS = 4  # the single mask and the three of an ambiguous prompt


class Attention(nn.Module):
    """Plain attention of one set of tokens to another, inside a narrower space."""

    def __init__(self, width: int, heads: int, shrink: int = 1) -> None:
        super().__init__()
        inner = width // shrink
        self.heads = heads
        self.q_proj = Linear(width, inner, bias=True)
        self.k_proj = Linear(width, inner, bias=True)
        self.v_proj = Linear(width, inner, bias=True)
        self.out_proj = Linear(inner, width, bias=True)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, still: Still) -> torch.Tensor:
        """[N, Q, C], [N, K, C], [N, K, C] → [N, Q, C]. What all prompts share, q or k and v, may have an N of 1."""
        q, k, v = (
            self._split(still.linear(layer, x)) for layer, x in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
        )
        if len(q) > len(k):  # the same keys for all: queries of all prompts are queries of one
            count, heads, length, dim = q.shape
            mixed = _mixed(q.transpose(0, 1).reshape(1, heads, count * length, dim), k, v)
            mixed = mixed.view(heads, count, length, dim).transpose(0, 1)
        else:
            mixed = _mixed(q.expand(len(k), -1, -1, -1), k, v)
        return still.linear(self.out_proj, mixed.transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


def _mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / √D) v of [N, heads, Q, D], [N, heads, K, D]; N of q and k may be 1."""
    if 8 * q.shape[2] > k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v)
    # few queries, many keys: a fused kernel would be as few programs as there are heads
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
    return scores.softmax(-1) @ v


class TokenMLP(nn.Module):
    """Up, ReLU, down."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.lin1 = Linear(width, inner, bias=True)
        self.lin2 = Linear(inner, width, bias=True)

    def forward(self, x: torch.Tensor, still: Still) -> torch.Tensor:
        """[…, C], the same shape."""
        return still.linear(self.lin2, torch.relu(still.linear(self.lin1, x)))


class TwoWay(nn.Module):
    """One round: tokens among themselves, tokens to image, MLP, image to tokens; a norm after each."""

    def __init__(self, width: int, heads: int, inner: int, first: bool) -> None:
        super().__init__()
        self.first = first
        self.self_attn = Attention(width, heads)
        self.norm1 = PlainNorm(width, EPS)
        self.cross_attn_token_to_image = Attention(width, heads, 2)
        self.norm2 = PlainNorm(width, EPS)
        self.mlp = TokenMLP(width, inner)
        self.norm3 = PlainNorm(width, EPS)
        self.cross_attn_image_to_token = Attention(width, heads, 2)
        self.norm4 = PlainNorm(width, EPS)

    def forward(
        self, tokens: torch.Tensor, image: torch.Tensor, start: torch.Tensor, places: torch.Tensor, still: Still
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [N, T, C], image [N or 1, P, C]; start: the tokens as they came; places: of the image, [P, C]."""
        if self.first:  # neither positions nor a residual
            tokens = self.self_attn(tokens, tokens, tokens, still)
        else:
            at = tokens + start
            tokens = tokens + self.self_attn(at, at, tokens, still)
        tokens = self.norm1(tokens)
        placed = image + places
        tokens = self.norm2(tokens + self.cross_attn_token_to_image(tokens + start, placed, image, still))
        tokens = self.norm3(tokens + self.mlp(tokens, still))
        image = image + self.cross_attn_image_to_token(placed, tokens + start, tokens, still)
        image = still.ops.layer_norm(image, self.norm4.weight, self.norm4.bias, self.norm4.eps)
        return tokens, image


class Transformer(nn.Module):
    """Two rounds, and a last look of the tokens at the image."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoWay(width, heads, inner, first=i == 0) for i in range(2))
        self.final_attn_token_to_image = Attention(width, heads, 2)
        self.norm_final_attn = PlainNorm(width, EPS)

    def forward(
        self, image: torch.Tensor, places: torch.Tensor, start: torch.Tensor, still: Still
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """image [N or 1, P, C], places [P, C], start [N, T, C] → tokens, image [N, P, C]."""
        tokens = start
        for layer in self.layers:
            tokens, image = layer(tokens, image, start, places, still)
        tokens = tokens + self.final_attn_token_to_image(tokens + start, image + places, image, still)
        return self.norm_final_attn(tokens), image


class Head(nn.Module):
    """Three linear layers with ReLU between them."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        sizes = ((width, width), (width, width), (width, out))
        self.layers = nn.ModuleList(Linear(a, b, bias=True) for a, b in sizes)

    def forward(self, x: torch.Tensor, still: Still) -> torch.Tensor:
        """[N, C] → [N, out]."""
        first, second, third = self.layers
        x = torch.relu(still.linear(first, x))  # type: ignore[arg-type]
        x = torch.relu(still.linear(second, x))  # type: ignore[arg-type]
        return still.linear(third, x)  # type: ignore[arg-type]


class MaskDecoder(nn.Module):
    """Embeddings of an image and of prompts to mask logits and predicted IoUs."""

    def __init__(self, width: int = 256, heads: int = 8, inner: int = 2048) -> None:
        super().__init__()
        self.transformer = Transformer(width, heads, inner)
        self.iou_token = Row(1, width)
        self.mask_tokens = Row(MASKS, width)
        self.output_upscaling = nn.ModuleDict(
            {
                "0": Conv2d(width, width // 4, 2, stride=2, up=True),
                "1": ChannelNorm(width // 4),
                "3": Conv2d(width // 4, width // 8, 2, stride=2, up=True),
            }
        )
        self.output_hypernetworks_mlps = nn.ModuleList(Head(width, width // 8) for _ in range(MASKS))
        self.iou_prediction_head = Head(width, MASKS)

    def forward(
        self, image: torch.Tensor, places: torch.Tensor, sparse: torch.Tensor, dense: torch.Tensor, still: Still
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """image: [N or 1, C, G, G]; places: [C, G, G]; sparse: [N, P, C]; dense: [N or 1, C, G, G].

        Returns all four masks' logits [N, 4, 4·G, 4·G] and their predicted IoUs [N, 4], both float32.
        """
        count, side = len(sparse), dense.shape[-1]
        own = torch.cat((self.iou_token.weight, self.mask_tokens.weight))
        tokens = torch.cat((own.expand(count, -1, -1), sparse.to(own.dtype)), 1)
        if not dense.stride(0):
            dense = dense[:1]  # the same for all
        source = (image + dense).flatten(2).transpose(1, 2).contiguous()
        at = places.to(own.dtype).flatten(1).t()
        tokens, source = self.transformer(source, at, tokens, still)
        makers = [make(tokens[:, 1 + i], still) for i, make in enumerate(self.output_hypernetworks_mlps)]
        masks = self._pixels(source, still) @ torch.stack(makers, 2).float()
        # what became of one token lies together, by row, column, half and half of a half
        parts = masks.view(count, side, side, 2, 2, 2, 2, MASKS).permute(0, 7, 1, 3, 5, 2, 4, 6)
        scores = self.iou_prediction_head(tokens[:, 0], still)
        return parts.reshape(count, MASKS, 4 * side, 4 * side), scores.float()

    def _pixels(self, image: torch.Tensor, still: Still) -> torch.Tensor:
        """[N, P, C] → [N, 16·P, C / 8] float32: each token becomes 2 × 2, each of those again.

        A transposed convolution whose parts do not overlap is a product of each token with all of them.
        """
        first, norm, second = (self.output_upscaling[name] for name in ("0", "1", "3"))
        assert isinstance(first, Conv2d)
        assert isinstance(norm, ChannelNorm)
        assert isinstance(second, Conv2d)
        x = _spread(image, first, still).unflatten(-1, (4, -1))
        x = F.gelu(still.ops.layer_norm(x, norm.weight, norm.bias, norm.eps))
        return F.gelu(_spread(x, second, still)).view(len(image), 16 * image.shape[1], -1).float()


def _spread(x: torch.Tensor, up: Conv2d, still: Still) -> torch.Tensor:
    """[…, C] → […, 4·out] of a transposed convolution of 2 × 2 with stride 2: upper left, upper right, lower left, …"""
    weight = up.weight.permute(2, 3, 1, 0).flatten(0, 2)
    assert up.bias is not None
    return still.ops.linear(x.reshape(-1, x.shape[-1]), weight, up.bias.repeat(4)).view(*x.shape[:-1], -1)
