"""Columns in clustered order: how many there are, which channel each is of, and the way there and
back.

perm: [P], for each column the channel that it is of, −1 where none goes.
"""

from __future__ import annotations

import torch


def rptq_group_layout(columns: int, mode: str, splits_per_channel: int = 1) -> tuple[int, int]:
    """(columns a group, groups) for K channels: as many groups as they fill, and a few for clusters
    that are small.

    Groups are as wide as the int8 instructions of large matrices like them, and small where
    channels are few. splits_per_channel: columns that each channel takes, all in one group.
    """
    if mode == "folded":
        unit = 32 if columns < 2048 else 128
        return -(-columns // unit) * unit, 1
    unit, spare = (32, 4) if columns < 2048 else (64, 4) if columns < 4096 else (128, 2)
    full = -(-columns // (unit // splits_per_channel))
    return unit, full + min(spare, -(-full // 8))


def repeated_columns(perm: torch.Tensor) -> torch.Tensor:
    """[P] bool, columns of a channel that has another column before them."""
    ranked = torch.sort(perm, stable=True)
    again = torch.zeros_like(perm, dtype=torch.bool)
    again[ranked.indices[1:]] = (ranked.values[1:] == ranked.values[:-1]) & (ranked.values[1:] >= 0)
    return again


def permute_columns(weight: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """[N, K] → [N, P] in clustered order, 0 where no channel goes."""
    return torch.where(perm >= 0, weight[:, perm.clamp(min=0).long()], 0.0)


def unpermute_columns(weight: torch.Tensor, perm: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of ``permute_columns``: [N, P] → [N, K]."""
    out = weight.new_zeros(weight.shape[0], columns)
    real = perm >= 0
    out[:, perm[real].long()] = weight[:, real]
    return out


def round_scale_to_fp16(scale: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, held as float32; a scale of 0 becomes 1."""
    scale = scale.half().float()
    return torch.where(scale == 0, torch.ones_like(scale), scale)
