"""Which shard of a model each rank has: pure arithmetic on sizes.

Shards are consecutive, cover everything, may be uneven, and start at multiples of an *alignment*:
rows or columns of a quantized weight that share a scale stay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm

from modelmill.core.errors import UsageError

Range = tuple[int, int]
# A rank's inner channels are a multiple of this where there are many: rows start at cache lines.
_CHANNEL_ALIGNMENT = 64


@dataclass(frozen=True)
class Shard:
    """A rank's shard of a matrix [N, K]: ranges of its rows and one range of its columns.

    Attributes:
        full_shape: (N, K).
        rows: Ranges of rows.
        columns: Range of columns.
        has_bias: Whether this rank adds the bias. If columns are split only one rank does, so that
            the all-reduced sum contains it once.
    """

    full_shape: tuple[int, int]
    rows: tuple[Range, ...]
    columns: Range
    has_bias: bool = True

    @staticmethod
    def from_rows(full_shape: tuple[int, int], *rows: Range) -> Shard:
        """Some outputs from all inputs (column-parallel linear)."""
        return Shard(full_shape, rows, (0, full_shape[1]))

    @staticmethod
    def from_columns(full_shape: tuple[int, int], columns: Range, rank: int) -> Shard:
        """All outputs from some inputs: a partial sum (row-parallel linear)."""
        return Shard(full_shape, ((0, full_shape[0]),), columns, has_bias=rank == 0)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the shard."""
        return sum(b - a for a, b in self.rows), self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class HeadShard:
    """The query heads of a rank, and the KV heads that they read."""

    q: Range
    kv: Range


def partition(count: int, size: int, alignment: int = 1, item_name: str = "items") -> list[Range]:
    """Split ``count`` items over ``size`` ranks as evenly as the alignment allows.

    The first ranks get the larger ranges.

    Args:
        count: Number of items.
        size: Number of ranks.
        alignment: Ranges start at multiples of it.
        item_name: For the message.

    Raises:
        UsageError: A rank would get no items.
    """
    units = -(-count // alignment)
    if units < size:
        raise UsageError(
            f"--tp {size}: the model's {count} {item_name} split into {units} at most; use --tp "
            f"{units} or less"
        )
    base, extra = divmod(units, size)
    edges = [min((rank * base + min(rank, extra)) * alignment, count) for rank in range(size + 1)]
    return list(pairwise(edges))


def partition_channels(channels: int, size: int, alignment: int = 1) -> list[Range]:
    """Split the inner channels of a branch over ranks.

    Where there are many, each rank starts at a cache line.

    Args:
        channels: Inner channels.
        size: Number of ranks.
        alignment: Of the columns that read them.

    Raises:
        UsageError: A rank would get no channels.
    """
    aligned = lcm(alignment, _CHANNEL_ALIGNMENT)
    has_many = channels >= 8 * size * aligned
    return partition(channels, size, aligned if has_many else alignment, "inner channels")


def partition_heads(
    heads: int, kv_heads: int, dim: int, size: int, alignment: int = 1
) -> list[HeadShard]:
    """Split query heads over ranks, together with the KV heads that they read.

    Up to ``kv_heads`` ranks get whole GQA groups. With more ranks, each has one KV head, some of
    them the same, and the ranks of a KV head split its query heads. So a rank has every KV head
    that its query heads read, and all its KV heads serve equally many query heads.

    Args:
        heads: Query heads.
        kv_heads: KV heads.
        dim: Head size.
        size: Number of ranks.
        alignment: Of the columns of the output projection.

    Raises:
        UsageError: The heads cannot be split so.
    """
    if size > heads:
        raise UsageError(
            f"--tp {size}: the model has {heads} attention heads; use --tp {heads} or less"
        )
    group = heads // kv_heads
    if size <= kv_heads:
        unit = lcm(group * dim, alignment) // (group * dim)
        parts = partition(kv_heads, size, unit, "KV heads")
        return [HeadShard((a * group, b * group), (a, b)) for a, b in parts]
    if (group * dim) % alignment and kv_heads > 1:
        raise UsageError(
            f"--tp {size}: groups of {alignment} weights cross the model's KV heads; use --tp "
            f"{kv_heads} or less"
        )
    unit = lcm(dim, alignment) // dim
    shards = []
    for kv, (first, last) in enumerate(partition(size, kv_heads)):
        parts = partition(group, last - first, unit, "query heads of a KV head")
        shards += [HeadShard((kv * group + a, kv * group + b), (kv, kv + 1)) for a, b in parts]
    return shards


def range_lengths(ranges: Sequence[Range]) -> tuple[int, ...]:
    """Number of items of each rank."""
    return tuple(b - a for a, b in ranges)


def cumulative_offsets(widths: Sequence[int]) -> list[int]:
    """First item of each rank, and the end."""
    return [0, *accumulate(widths)]
