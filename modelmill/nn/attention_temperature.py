"""A factor of rotated queries that grows with the position, beyond the trained length."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionTemperature:
    """1 + slope · ln(1 + ⌊position / length⌋), as in Llama 4 and Ministral 3.

    Attributes:
        slope: 0: the factor stays 1.
        length: Positions with the factor 1.
    """

    slope: float
    length: int

    def factors(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The factor of each token, [T] float32, rounded to the activations' dtype."""
        periods = torch.floor(positions / self.length)
        return (1 + self.slope * torch.log(1 + periods)).to(dtype).float()
