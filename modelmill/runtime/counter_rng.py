"""Counter-based random numbers: a number depends on (seed, position) alone.

So a seeded request gets the same numbers in any batch, after a preemption and on any device.
The mixing function is splitmix64's finaliser (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_A = np.uint64(0xBF58476D1CE4E5B9)
_B = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def splitmix64(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which every input bit flips about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * _A
    x = (x ^ (x >> np.uint64(27))) * _B
    return x ^ (x >> np.uint64(31))


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1): [B] float64 with 53 random bits.

    Args:
        seeds: [B] uint64.
        positions: [B] integers.
    """
    counter = positions.astype(np.uint64) * _GOLDEN
    return (splitmix64(splitmix64(seeds + _GOLDEN) ^ counter) >> np.uint64(11)).astype(
        np.float64
    ) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of stream ``index`` of ``seed``; that of stream 0 differs from ``seed``."""
    state = np.array([seed & _MASK], dtype=np.uint64)
    step = np.array([(index + 1) & _MASK], dtype=np.uint64)
    return int(splitmix64(splitmix64(state + _GOLDEN) + step * _GOLDEN)[0])
