"""Decodes run lengths and COCO's compressed form of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def from_coco_rle(packed: dict[str, Any]) -> list[int]:
    """Decode COCO's compressed form to run lengths."""
    runs: list[int] = []
    value = shift = 0
    for character in packed["counts"]:
        bits = ord(character) - 48
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
        value = shift = 0
    return runs


def decode_rle(runs: Sequence[int], height: int, width: int) -> torch.Tensor:
    """Decode uncompressed run lengths to a mask [H, W] bool.

    Raises:
        ValueError: if the runs do not cover exactly H · W pixels.
    """
    if sum(runs) != height * width or any(r < 0 for r in runs):
        raise ValueError(f"run lengths cover {sum(runs)} of {height * width} pixels")
    values = np.arange(len(runs)) % 2 == 1
    flat = np.repeat(values, np.asarray(runs, dtype=np.int64))
    return torch.from_numpy(flat.reshape(width, height).T.copy())
