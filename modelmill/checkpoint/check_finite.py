"""Finds NaN and infinity in weights before anything is computed from them."""

from __future__ import annotations

import torch

from modelmill.core.errors import CorruptCheckpoint

CHUNK_VALUES = 1 << 24


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise CorruptCheckpoint naming the tensor if any value is NaN or infinite.

    Any shape and dtype; integers pass. It takes one pass and no memory of the tensor's size (float8
    is converted a chunk at a time).
    """
    if not tensor.dtype.is_floating_point or tensor.numel() == 0:
        return
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), CHUNK_VALUES):
        part = flat[start : start + CHUNK_VALUES]
        if part.dtype.itemsize == 1:
            part = part.float()
        if is_finite(part):
            continue
        low, high = torch.aminmax(part)
        problem = "NaN" if torch.isnan(low) or torch.isnan(high) else "infinity"
        raise CorruptCheckpoint(
            f"the tensor {name} holds {problem}; the checkpoint is damaged or was saved from a "
            "failed run"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a floating tensor is finite, in one pass without a copy."""
    if tensor.numel() == 0:
        return True
    # NaN propagates through aminmax and infinity is an extreme, so the two extremes are sufficient.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
