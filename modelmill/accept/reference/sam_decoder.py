"""SAM's prompt encoder and mask decoder in plain float32 (arXiv:2304.02643, appendix A)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from modelmill.accept.reference.sam import SamReference
from modelmill.accept.reference.vision_reference import ReferenceStage

NUM_HEADS = 8
LAYER_NORM_EPS = 1e-5


class SamDecoderReference:
    """The prompt encoder and the mask decoder.

    tokens_per_side: of the embedding.
    """

    def __init__(self, reference: SamReference) -> None:
        self.reference = reference
        self.get = reference.get
        self.linear = reference.linear
        self.norm = reference.norm

    def prompt_encoder_stages(
        self, points: Tensor, labels: Tensor, mask: Tensor | None
    ) -> Iterator[ReferenceStage]:
        """Yield the stages of the prompt encoder: sparse, dense and position embeddings.

        Args:
            points: [N, P, 2] in the encoder's pixels.
            labels: [N, P] (−1 absent, 0, 1, corners 2 and 3).
            mask: mask logits.
        """
        reference, matrix = (
            self.reference,
            self.get("prompt_encoder.pe_layer.positional_encoding_gaussian_matrix"),
        )
        sparse = self._fourier_features((points + 0.5) / reference.image_size, matrix)
        rows = [self.get(f"prompt_encoder.point_embeddings.{i}.weight")[0] for i in range(4)]
        nothing = self.get("prompt_encoder.not_a_point_embed.weight")[0]
        for place in torch.cartesian_prod(torch.arange(len(labels)), torch.arange(labels.shape[1])):
            n, p = place.tolist()
            label = int(labels[n, p])
            sparse[n, p] = nothing if label < 0 else sparse[n, p] + rows[label]
        yield ReferenceStage(
            "prompt_encoder.embed_points", None, "sparse", (points, labels), (sparse,)
        )
        yield ReferenceStage(
            "prompt_encoder.embed_masks",
            None,
            "dense",
            (mask, len(points)),
            (self._dense_mask_embedding(mask, len(points)),),
        )
        at = (torch.arange(reference.tokens_per_side) + 0.5) / reference.tokens_per_side
        grid = torch.stack((at[None, :].expand(len(at), -1), at[:, None].expand(-1, len(at))), -1)
        places = self._fourier_features(grid, matrix).permute(2, 0, 1)
        yield ReferenceStage("prompt_encoder.dense_pe", None, "dense_pe", (), (places,))

    def mask_decoder_stages(
        self, image_embedding: Tensor, image_positions: Tensor, sparse: Tensor, dense: Tensor
    ) -> Iterator[ReferenceStage]:
        """Yield the stages of the transformer, then logits [N, 4, 4G, 4G] and scores [N, 4].

        image_embedding: [1, C, G, G].
        """
        root, count = "mask_decoder", len(sparse)
        own = torch.cat(
            (self.get(f"{root}.iou_token.weight"), self.get(f"{root}.mask_tokens.weight"))
        )
        start = torch.cat((own.expand(count, -1, -1), sparse), 1)
        pixels, at = (
            (image_embedding + dense).flatten(2).transpose(1, 2),
            image_positions.flatten(1).t(),
        )
        first, tokens = pixels, start
        for i in range(2):
            block_inputs = (tokens, pixels, start, at)
            tokens, pixels = self._two_way_block(
                f"{root}.transformer.layers.{i}", i == 0, *block_inputs
            )
            yield ReferenceStage(
                f"{root}.transformer.layers.{i}",
                None,
                f"transformer.layers.{i}",
                block_inputs,
                (tokens, pixels),
            )
        path = f"{root}.transformer"
        last = self._attention(
            f"{path}.final_attn_token_to_image", tokens + start, pixels + at, pixels
        )
        tokens = self.norm(f"{path}.norm_final_attn", tokens + last, LAYER_NORM_EPS)
        yield ReferenceStage(path, None, "transformer", (first, at, start), (tokens, pixels))
        side = image_embedding.shape[-1]
        maps = self._upscale_mask_features(pixels.transpose(1, 2).reshape(count, -1, side, side))
        makers = [
            self._mlp(f"{root}.output_hypernetworks_mlps.{i}.layers",
            tokens[:, 1 + i]) for i in range(4)
        ]  # fmt: skip
        masks = torch.einsum("nmc,nchw->nmhw", torch.stack(makers, 1), maps)
        scores = self._mlp(f"{root}.iou_prediction_head.layers", tokens[:, 0])
        yield ReferenceStage(
            root, None, "masks", (image_embedding, image_positions, sparse, dense), (masks, scores)
        )

    def _fourier_features(self, coords: Tensor, matrix: Tensor) -> Tensor:
        angles = (2 * coords - 1) @ matrix * (2 * math.pi)
        return torch.cat((torch.sin(angles), torch.cos(angles)), -1)

    def _dense_mask_embedding(self, mask: Tensor | None, num_prompts: int) -> Tensor:
        grid = self.reference.tokens_per_side
        if mask is None:
            return (
                self.get("prompt_encoder.no_mask_embed.weight")
                .view(1, -1, 1, 1)
                .expand(num_prompts, -1, grid, grid)
            )
        path = "prompt_encoder.mask_downscaling"
        for conv, norm in ((0, 1), (3, 4)):
            mask = F.conv2d(
                mask, self.get(f"{path}.{conv}.weight"), self.get(f"{path}.{conv}.bias"), stride=2
            )
            mask = F.gelu(self.norm(f"{path}.{norm}", mask, 1e-6, channels=True))
        return F.conv2d(mask, self.get(f"{path}.6.weight"), self.get(f"{path}.6.bias"))

    def _upscale_mask_features(self, x: Tensor) -> Tensor:
        path = "mask_decoder.output_upscaling"
        x = F.conv_transpose2d(
            x, self.get(f"{path}.0.weight"), self.get(f"{path}.0.bias"), stride=2
        )
        x = F.gelu(self.norm(f"{path}.1", x, 1e-6, channels=True))
        return F.gelu(
            F.conv_transpose2d(
                x, self.get(f"{path}.3.weight"), self.get(f"{path}.3.bias"), stride=2
            )
        )

    def _mlp(self, path: str, x: Tensor) -> Tensor:
        for i in range(2):
            x = self.linear(f"{path}.{i}", x).clamp(min=0)
        return self.linear(f"{path}.2", x)

    def _attention(self, path: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            self.linear(f"{path}.{n}_proj", x).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
            for n, x in (("q", q), ("k", k), ("v", v))
        )
        weights = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.linear(f"{path}.out_proj", (weights @ v).transpose(1, 2).flatten(2))

    def _two_way_block(
        self,
        path: str,
        is_first: bool,
        tokens: Tensor,
        pixels: Tensor,
        token_positions: Tensor,
        pixel_positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if is_first:
            tokens = self._attention(f"{path}.self_attn", tokens, tokens, tokens)
        else:
            tokens = tokens + self._attention(
                f"{path}.self_attn", tokens + token_positions, tokens + token_positions, tokens
            )
        tokens = self.norm(f"{path}.norm1", tokens, LAYER_NORM_EPS)
        looked = self._attention(
            f"{path}.cross_attn_token_to_image",
            tokens + token_positions,
            pixels + pixel_positions,
            pixels,
        )
        tokens = self.norm(f"{path}.norm2", tokens + looked, LAYER_NORM_EPS)
        inner = self.linear(
            f"{path}.mlp.lin2", self.linear(f"{path}.mlp.lin1", tokens).clamp(min=0)
        )
        tokens = self.norm(f"{path}.norm3", tokens + inner, LAYER_NORM_EPS)
        update = self._attention(
            f"{path}.cross_attn_image_to_token",
            pixels + pixel_positions,
            tokens + token_positions,
            tokens,
        )
        return tokens, self.norm(f"{path}.norm4", pixels + update, LAYER_NORM_EPS)
