"""ALiBi: attention scores fall linearly with distance, by a slope per head (arXiv:2108.12409)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AlibiConfig:
    """The slopes.

    Attributes:
        bias_max: The exponent of the last head's slope, 2^−bias_max.
        scale: Factor of the slopes.
    """

    bias_max: float = 8.0
    scale: float = 1.0

    def slopes(self, heads: int) -> list[float]:
        """The slope of each head: a geometric sequence for a power of two of heads.

        Otherwise that of the power of two below, then every second one of twice as many heads.
        """
        power = 1 << (heads.bit_length() - 1)
        slopes = self._geometric_slopes(power)
        return [*slopes, *self._geometric_slopes(2 * power)[0::2]][:heads]

    def _geometric_slopes(self, heads: int) -> list[float]:
        return [self.scale * 2.0 ** (-self.bias_max * (head + 1) / heads) for head in range(heads)]
