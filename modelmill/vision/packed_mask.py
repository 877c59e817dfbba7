"""A mask's pixels as bits: an eighth of the bytes of a bool mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

_GATHER_BITS = sum(1 << (63 - 9 * i) for i in range(8)) - (1 << 64)  # as a signed integer


@dataclass(frozen=True)
class PackedMask:
    """The pixels of a mask inside its box.

    Attributes:
        bits: [h, ceil((shift + width) / 8)] uint8 on the CPU, rows of pixels, the highest bit
            first.
        shift: bits before the first pixel of a row, 0 … 7.
        width: pixels of a row.
    """

    bits: torch.Tensor
    shift: int
    width: int

    @classmethod
    def pack(cls, pixels: torch.Tensor) -> PackedMask:
        """Pack pixels [h, w] bool on the CPU."""
        return cls(pack_mask_bits(pixels), 0, int(pixels.shape[1]))

    @classmethod
    def crop(cls, rows: torch.Tensor, box: Sequence[int]) -> PackedMask:
        """Copy the part of a packed mask that a box contains.

        Args:
            rows: [H, ceil(W / 8)] uint8 on the CPU, from ``pack_mask_bits``.
            box: x0, y0, x1, y1 in pixels, inclusive.
        """
        x0, y0, x1, y1 = box
        return cls(rows[y0 : y1 + 1, x0 // 8 : x1 // 8 + 1].clone(), x0 % 8, x1 + 1 - x0)

    def unpack(self) -> torch.Tensor:
        """Return the pixels [h, width] bool."""
        end = self.shift + self.width
        pixels = np.unpackbits(self.bits.numpy(), axis=1, count=end)[:, self.shift :]
        return torch.from_numpy(np.ascontiguousarray(pixels)).view(torch.bool)


def pack_mask_bits(masks: torch.Tensor) -> torch.Tensor:
    """Pack masks […, H, W] bool to bits […, H, ceil(W / 8)] uint8, on the masks' device."""
    if masks.device.type == "cpu":
        return torch.from_numpy(np.packbits(masks.numpy(), axis=-1))
    return _pack_mask_bits_torch(masks)


def _pack_mask_bits_torch(masks: torch.Tensor) -> torch.Tensor:
    """As ``pack_mask_bits``, where numpy cannot read the masks: on a GPU.

    Eight pixels are one integer of 64 bits, whose byte i is pixel i (little-endian). Its product
    with ``_GATHER_BITS`` has pixel i in bit 63 − i: the sum of pixel i · 2^8i · 2^(63 − 9i), where
    no two terms of the product fall on the same bit. The last byte is the eight bits.
    """
    padded = F.pad(masks.view(torch.uint8), (0, -masks.shape[-1] % 8)).contiguous()
    groups = torch.empty(padded.shape, dtype=torch.uint8, device=padded.device)
    torch.mul(padded.view(torch.int64), _GATHER_BITS, out=groups.view(torch.int64))
    return groups[..., 7::8].contiguous()
