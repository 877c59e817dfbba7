"""Column layout of RPTQ weights: number of columns, channel of each column, permutation.

perm: [P], the channel of each column, −1 for an empty column.
"""

from __future__ import annotations

import torch


def rptq_group_width_and_count(
    columns: int, mode: str, splits_per_channel: int = 1
) -> tuple[int, int]:
    """Return (columns per group, groups) for K channels.

    There are as many groups as the channels fill, and a few spare ones for small clusters. The
    width of a group fits the int8 instructions of large matrices and is small for few channels.

    Args:
        columns: K.
        mode: "exact", "folded" or "dynamic".
        splits_per_channel: columns per channel, all in one group.
    """
    if mode == "folded":
        unit = 32 if columns < 2048 else 128
        return -(-columns // unit) * unit, 1
    unit, spare = (32, 4) if columns < 2048 else (64, 4) if columns < 4096 else (128, 2)
    full = -(-columns // (unit // splits_per_channel))
    return unit, full + min(spare, -(-full // 8))


def repeated_channel_column_mask(perm: torch.Tensor) -> torch.Tensor:
    """Return [P] bool, true for columns whose channel already has an earlier column."""
    ranked = torch.sort(perm, stable=True)
    again = torch.zeros_like(perm, dtype=torch.bool)
    again[ranked.indices[1:]] = (ranked.values[1:] == ranked.values[:-1]) & (ranked.values[1:] >= 0)
    return again


def gather_clustered_columns(weight: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    """Return [N, K] as [N, P] in clustered order, 0 in empty columns."""
    return torch.where(perm >= 0, weight[:, perm.clamp(min=0).long()], 0.0)


def restore_channel_columns(weight: torch.Tensor, perm: torch.Tensor, columns: int) -> torch.Tensor:
    """Invert ``gather_clustered_columns``: [N, P] → [N, K]."""
    out = weight.new_zeros(weight.shape[0], columns)
    real = perm >= 0
    out[:, perm[real].long()] = weight[:, real]
    return out


def round_scale_to_fp16(scale: torch.Tensor) -> torch.Tensor:
    """Round to float16 values in a float32 tensor; a scale of 0 becomes 1."""
    scale = scale.half().float()
    return torch.where(scale == 0, torch.ones_like(scale), scale)
