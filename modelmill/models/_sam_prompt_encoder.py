"""SAM's prompt encoder: points, boxes and masks to embeddings (Kirillov et al.

2023, arXiv:2304.02643).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.conv import Conv2d, LayerNorm2d

# labels of points; the two corners of a box are 2 and 3
NOT_A_POINT = -1


class SamEmbedding(nn.Module):
    """A few learned rows."""

    weight: torch.Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(rows, width, device="meta"))


class FourierPositionEncoding(nn.Module):
    """Random Fourier features of positions (Tancik et al. 2020, arXiv:2006.10739)."""

    positional_encoding_gaussian_matrix: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer(
            "positional_encoding_gaussian_matrix", torch.empty(2, width // 2, device="meta")
        )

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions […, 2], x and y in [0, 1] → […, C] float32.

        In float32, since the angles reach hundreds of radians.
        """
        angles = (
            2
            * math.pi
            * ((2 * positions.float() - 1) @ self.positional_encoding_gaussian_matrix.float())
        )
        return torch.cat((angles.sin(), angles.cos()), -1)


class SamPromptEncoder(nn.Module):
    """Prompts to sparse and dense embeddings.

    image_size: pixels a side; grid_size: tokens a side.
    """

    def __init__(self, width: int, image_size: int, grid_size: int) -> None:
        super().__init__()
        self.width = width
        self.image_size = image_size
        self.grid_size = grid_size
        self._dense_pe_cache: tuple[torch.Tensor, torch.Tensor] | None = None
        self.pe_layer = FourierPositionEncoding(width)
        self.point_embeddings = nn.ModuleList(SamEmbedding(1, width) for _ in range(4))
        self.not_a_point_embed = SamEmbedding(1, width)
        self.no_mask_embed = SamEmbedding(1, width)
        self.mask_downscaling = nn.ModuleDict(
            {
                "0": Conv2d(1, 4, 2, stride=2),
                "1": LayerNorm2d(4),
                "3": Conv2d(4, 16, 2, stride=2),
                "4": LayerNorm2d(16),
                "6": Conv2d(16, width, 1),
            }
        )

    def embed_points(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Embed points and the corners of boxes.

        Label −1 is padding. A prompt without a box ends with one padding point; the corners of a
        box are points with the labels 2 and 3. Callers arrange them so (``vision.prompts``).

        Args:
            points: [N, P, 2] x, y in the encoder's pixels.
            labels: [N, P].

        Returns:
            [N, P, C] float32.
        """
        embeddings = self.pe_layer((points.float() + 0.5) / self.image_size)
        embeddings = torch.where(
            (labels == NOT_A_POINT)[..., None], torch.zeros_like(embeddings), embeddings
        )
        rows: list[SamEmbedding] = [self.not_a_point_embed, *self.point_embeddings]
        table = torch.cat([row.weight for row in rows]).float()
        return embeddings + table[labels.long() + 1]

    def embed_masks(self, masks: torch.Tensor | None, count: int) -> torch.Tensor:
        """masks: [N, 1, 4·G, 4·G] logits, G the grid size, or None. Returns [N, C, G, G]."""
        if masks is None:
            return self.no_mask_embed.weight.view(1, -1, 1, 1).expand(
                count, -1, self.grid_size, self.grid_size
            )
        steps = self.mask_downscaling
        x = F.gelu(steps["1"](steps["0"](masks.to(self.no_mask_embed.weight.dtype))))
        return steps["6"](F.gelu(steps["4"](steps["3"](x))))

    def dense_pe(self) -> torch.Tensor:
        """The position of every token of the image, [C, grid, grid] float32; computed once."""
        matrix = self.pe_layer.positional_encoding_gaussian_matrix
        if self._dense_pe_cache is None or self._dense_pe_cache[0] is not matrix:
            at = (torch.arange(self.grid_size, device=matrix.device) + 0.5) / self.grid_size
            y, x = torch.meshgrid(at, at, indexing="ij")
            self._dense_pe_cache = matrix, self.pe_layer(torch.stack((x, y), -1)).permute(2, 0, 1)
        return self._dense_pe_cache[1]
