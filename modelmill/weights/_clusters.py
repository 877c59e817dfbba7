"""Columns in clustered order: how many there are, which channel each is of, and the way there and back.

order: [P], for each column the channel that it is of, −1 where none goes.
"""

from __future__ import annotations

import torch


def groups_of(columns: int, mode: str, copies: int = 1) -> tuple[int, int]:
    """(columns a group, groups) for K channels: as many groups as they fill, and a few for clusters that are small.

    Groups are as wide as the int8 instructions of large matrices like them, and small where channels are few. copies:
    columns that each channel takes, all in one group.
    """
    if mode == "folded":
        unit = 32 if columns < 2048 else 128
        return -(-columns // unit) * unit, 1
    unit, spare = (32, 4) if columns < 2048 else (64, 4) if columns < 4096 else (128, 2)
    full = -(-columns // (unit // copies))
    return unit, full + min(spare, -(-full // 8))


def repeated(order: torch.Tensor) -> torch.Tensor:
    """[P] bool, columns of a channel that has another column before them."""
    ranked = torch.sort(order, stable=True)
    again = torch.zeros_like(order, dtype=torch.bool)
    again[ranked.indices[1:]] = (ranked.values[1:] == ranked.values[:-1]) & (ranked.values[1:] >= 0)
    return again


def spread(weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[N, K] → [N, P] in clustered order, 0 where no channel goes."""
    return torch.where(order >= 0, weight[:, order.clamp(min=0).long()], 0.0)


def gathered(wide: torch.Tensor, order: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of ``spread``: [N, P] → [N, K]."""
    out = wide.new_zeros(wide.shape[0], columns)
    real = order >= 0
    out[:, order[real].long()] = wide[:, real]
    return out


def settled(scale: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, held as float32; a scale of 0 becomes 1."""
    scale = scale.half().float()
    return torch.where(scale == 0, torch.ones_like(scale), scale)
