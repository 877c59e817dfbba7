"""SAM's prompt encoder and mask decoder in plain float32, stage by stage (arXiv:2304.02643, appendix A)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from modelmill.accept.reference.sam import SamReference
from modelmill.accept.reference.stage import Stage

HEADS = 8
EPS = 1e-5


class SamDecoder:
    """What stands behind the encoder. grid: tokens a side of the embedding."""

    def __init__(self, reference: SamReference) -> None:
        self.reference = reference
        self.get, self.linear, self.norm = reference.get, reference.linear, reference.norm

    def prompts(self, points: Tensor, labels: Tensor, mask: Tensor | None) -> Iterator[Stage]:
        """points [N, P, 2] in the encoder's pixels, labels [N, P] (−1 absent, 0, 1, corners 2 and 3), mask logits.

        Stages: the sparse embeddings, the dense ones, the positions of the image's tokens.
        """
        reference, matrix = self.reference, self.get("prompt_encoder.pe_layer.positional_encoding_gaussian_matrix")
        sparse = self._waves((points + 0.5) / reference.image, matrix)
        rows = [self.get(f"prompt_encoder.point_embeddings.{i}.weight")[0] for i in range(4)]
        nothing = self.get("prompt_encoder.not_a_point_embed.weight")[0]
        for place in torch.cartesian_prod(torch.arange(len(labels)), torch.arange(labels.shape[1])):
            n, p = place.tolist()
            label = int(labels[n, p])
            sparse[n, p] = nothing if label < 0 else sparse[n, p] + rows[label]
        yield Stage("prompt_encoder.sparse", None, "sparse", (points, labels), (sparse,))
        yield Stage("prompt_encoder.dense", None, "dense", (mask, len(points)), (self._dense(mask, len(points)),))
        at = (torch.arange(reference.grid) + 0.5) / reference.grid
        grid = torch.stack((at[None, :].expand(len(at), -1), at[:, None].expand(-1, len(at))), -1)
        places = self._waves(grid, matrix).permute(2, 0, 1)
        yield Stage("prompt_encoder.everywhere", None, "everywhere", (), (places,))

    def decoder(self, image: Tensor, places: Tensor, sparse: Tensor, dense: Tensor) -> Iterator[Stage]:
        """image [1, C, G, G] → stages of the transformer, then the logits [N, 4, 4G, 4G] and the scores [N, 4]."""
        root, count = "mask_decoder", len(sparse)
        own = torch.cat((self.get(f"{root}.iou_token.weight"), self.get(f"{root}.mask_tokens.weight")))
        start = torch.cat((own.expand(count, -1, -1), sparse), 1)
        pixels, at = (image + dense).flatten(2).transpose(1, 2), places.flatten(1).t()
        first, tokens = pixels, start
        for i in range(2):
            given = (tokens, pixels, start, at)
            tokens, pixels = self._round(f"{root}.transformer.layers.{i}", i == 0, *given)
            yield Stage(f"{root}.transformer.layers.{i}", None, f"transformer.layers.{i}", given, (tokens, pixels))
        path = f"{root}.transformer"
        last = self._attend(f"{path}.final_attn_token_to_image", tokens + start, pixels + at, pixels)
        tokens = self.norm(f"{path}.norm_final_attn", tokens + last, EPS)
        yield Stage(path, None, "transformer", (first, at, start), (tokens, pixels))
        side = image.shape[-1]
        maps = self._enlarged(pixels.transpose(1, 2).reshape(count, -1, side, side))
        makers = [
            self._three(f"{root}.output_hypernetworks_mlps.{i}.layers", tokens[:, 1 + i]) for i in range(4)
        ]  # fmt: skip
        masks = torch.einsum("nmc,nchw->nmhw", torch.stack(makers, 1), maps)
        scores = self._three(f"{root}.iou_prediction_head.layers", tokens[:, 0])
        yield Stage(root, None, "masks", (image, places, sparse, dense), (masks, scores))

    def _waves(self, places: Tensor, matrix: Tensor) -> Tensor:
        angles = (2 * places - 1) @ matrix * (2 * math.pi)
        return torch.cat((torch.sin(angles), torch.cos(angles)), -1)

    def _dense(self, mask: Tensor | None, count: int) -> Tensor:
        grid = self.reference.grid
        if mask is None:
            return self.get("prompt_encoder.no_mask_embed.weight").view(1, -1, 1, 1).expand(count, -1, grid, grid)
        path = "prompt_encoder.mask_downscaling"
        for conv, norm in ((0, 1), (3, 4)):
            mask = F.conv2d(mask, self.get(f"{path}.{conv}.weight"), self.get(f"{path}.{conv}.bias"), stride=2)
            mask = F.gelu(self.norm(f"{path}.{norm}", mask, 1e-6, channels=True))
        return F.conv2d(mask, self.get(f"{path}.6.weight"), self.get(f"{path}.6.bias"))

    def _enlarged(self, x: Tensor) -> Tensor:
        path = "mask_decoder.output_upscaling"
        x = F.conv_transpose2d(x, self.get(f"{path}.0.weight"), self.get(f"{path}.0.bias"), stride=2)
        x = F.gelu(self.norm(f"{path}.1", x, 1e-6, channels=True))
        return F.gelu(F.conv_transpose2d(x, self.get(f"{path}.3.weight"), self.get(f"{path}.3.bias"), stride=2))

    def _three(self, path: str, x: Tensor) -> Tensor:
        for i in range(2):
            x = self.linear(f"{path}.{i}", x).clamp(min=0)
        return self.linear(f"{path}.2", x)

    def _attend(self, path: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            self.linear(f"{path}.{n}_proj", x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for n, x in (("q", q), ("k", k), ("v", v))
        )
        weights = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.linear(f"{path}.out_proj", (weights @ v).transpose(1, 2).flatten(2))

    def _round(
        self, path: str, first: bool, tokens: Tensor, pixels: Tensor, start: Tensor, at: Tensor
    ) -> tuple[Tensor, Tensor]:
        if first:
            tokens = self._attend(f"{path}.self_attn", tokens, tokens, tokens)
        else:
            tokens = tokens + self._attend(f"{path}.self_attn", tokens + start, tokens + start, tokens)
        tokens = self.norm(f"{path}.norm1", tokens, EPS)
        looked = self._attend(f"{path}.cross_attn_token_to_image", tokens + start, pixels + at, pixels)
        tokens = self.norm(f"{path}.norm2", tokens + looked, EPS)
        inner = self.linear(f"{path}.mlp.lin2", self.linear(f"{path}.mlp.lin1", tokens).clamp(min=0))
        tokens = self.norm(f"{path}.norm3", tokens + inner, EPS)
        told = self._attend(f"{path}.cross_attn_image_to_token", pixels + at, tokens + start, tokens)
        return tokens, self.norm(f"{path}.norm4", pixels + told, EPS)
