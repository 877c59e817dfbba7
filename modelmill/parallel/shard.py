"""Which part of a model each rank holds: pure arithmetic on sizes.

Parts are consecutive, cover everything, may be uneven, and start at multiples of an *alignment*:
the rows or columns of a quantized weight that share a scale stay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm

from modelmill.core.errors import UsageError

Range = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """What a rank holds of a matrix [N, K]: stretches of its rows, one stretch of its columns.

    full_shape: (N, K). has_bias: whether this rank adds the bias; where columns are split one rank
    does, so that the sum over the ranks holds it once.
    """

    full_shape: tuple[int, int]
    rows: tuple[Range, ...]
    columns: Range
    has_bias: bool = True

    @staticmethod
    def from_rows(full_shape: tuple[int, int], *rows: Range) -> Shard:
        """Some outputs of all inputs."""
        return Shard(full_shape, rows, (0, full_shape[1]))

    @staticmethod
    def from_columns(full_shape: tuple[int, int], columns: Range, rank: int) -> Shard:
        """All outputs of some inputs: a summand."""
        return Shard(full_shape, ((0, full_shape[0]),), columns, has_bias=rank == 0)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the part."""
        return sum(b - a for a, b in self.rows), self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class HeadShard:
    """The query heads of a rank, and the KV heads that they read."""

    q: Range
    kv: Range

    def qkv_rows(self, heads: int, kv_heads: int, dim: int) -> tuple[Range, Range, Range]:
        """Their rows in a fused projection [q; k; v]."""
        k, v = heads * dim, (heads + kv_heads) * dim
        a, b = self.kv[0] * dim, self.kv[1] * dim
        return (self.q[0] * dim, self.q[1] * dim), (k + a, k + b), (v + a, v + b)


def partition(count: int, size: int, alignment: int = 1, item_name: str = "items") -> list[Range]:
    """``count`` items over ``size`` ranks, as even as the alignment allows; the first ranks hold
    the larger parts.

    Raises UsageError where a rank would hold none.
    """
    units = -(-count // alignment)
    if units < size:
        raise UsageError(
            f"--tp {size}: the model's {count} {item_name} split into {units} at most; use --tp "
            f"{units} or less"
        )
    base, more = divmod(units, size)
    edges = [min((rank * base + min(rank, more)) * alignment, count) for rank in range(size + 1)]
    return list(pairwise(edges))


def partition_heads(
    heads: int, kv_heads: int, dim: int, size: int, alignment: int = 1
) -> list[HeadShard]:
    """Query heads with the KV heads that they read; ``alignment``: of the columns of the output
    projection.

    Up to ``kv_heads`` ranks share out whole groups. More ranks than that hold one KV head each,
    some of them the same, and share out its query heads: a rank's query heads never read more than
    it holds, and all KV heads of a rank serve equally many. Raises UsageError where that cannot be.
    """
    if size > heads:
        raise UsageError(
            f"--tp {size}: the model has {heads} attention heads; use --tp {heads} or less"
        )
    group = heads // kv_heads
    if size <= kv_heads:
        together = lcm(group * dim, alignment) // (group * dim)
        parts = partition(kv_heads, size, together, "KV heads")
        return [HeadShard((a * group, b * group), (a, b)) for a, b in parts]
    if (group * dim) % alignment and kv_heads > 1:
        raise UsageError(
            f"--tp {size}: groups of {alignment} weights cross the model's KV heads; use --tp "
            f"{kv_heads} or less"
        )
    together = lcm(dim, alignment) // dim
    found = []
    for kv, (first, last) in enumerate(partition(size, kv_heads)):
        inside = partition(group, last - first, together, "query heads of a KV head")
        found += [HeadShard((kv * group + a, kv * group + b), (kv, kv + 1)) for a, b in inside]
    return found


def range_lengths(ranges: Sequence[Range]) -> tuple[int, ...]:
    """How many items each rank holds."""
    return tuple(b - a for a, b in ranges)


def range_starts(widths: Sequence[int]) -> list[int]:
    """Where each rank's items begin, and the end."""
    return [0, *accumulate(widths)]
