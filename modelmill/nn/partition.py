"""What the ranks of a group divide of a layer: heads, heads with a state, channels, experts.

Parts and columns of linear layers name the partition by which they are divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from modelmill.core.errors import UsageError
from modelmill.parallel.shard import Range, partition, partition_channels, partition_heads


@dataclass(frozen=True)
class HeadGroups:
    """Query heads that read the channels of fewer KV heads."""

    q_heads: int
    kv_heads: int
    head_dim: int

    def reshape_by_group(self, vector: torch.Tensor) -> torch.Tensor:
        """A vector over the query heads' channels as [kv_heads, q_heads / kv_heads, head_dim]."""
        return vector.view(self.kv_heads, self.q_heads // self.kv_heads, self.head_dim)


class HeadShardable(Protocol):
    """A module that keeps a rank's heads.

    Attributes:
        kv_heads: Its KV heads.
    """

    kv_heads: int

    def keep_local_heads(self, heads: Range, kv_heads: Range) -> None:
        """Keep these query heads and KV heads."""


class ChannelShardable(Protocol):
    """A module that keeps a rank's channels."""

    def keep_local_channels(self, channels: Range) -> None:
        """Keep these channels."""


class ExpertShardable(Protocol):
    """A mixture that keeps a rank's experts."""

    def keep_local_experts(self, experts: Range) -> None:
        """Keep these experts."""


@dataclass(frozen=True)
class HeadPartition:
    """Ranks divide query heads, with the KV heads that they read.

    Attributes:
        module: The module that takes the rank's heads (``keep_local_heads``).
        groups: The heads.
        q, kv: The names of both in ``LinearRowBlock.split`` and ``LinearSpec.split_columns``.
        gates: The name of rows of which each query head has one.
    """

    module: str
    groups: HeadGroups
    q: str = "q_heads"
    kv: str = "kv_heads"
    gates: str = "head_gates"

    def rank_head_ranges(self, rank: int, size: int, alignment: int) -> tuple[Range, Range]:
        """The rank's query heads and KV heads."""
        g = self.groups
        shard = partition_heads(g.q_heads, g.kv_heads, g.head_dim, size, alignment)[rank]
        return shard.q, shard.kv

    @property
    def split_axis_names(self) -> tuple[str, ...]:
        """The names by which linears are divided."""
        return self.q, self.kv

    def rank_channel_ranges(self, rank: int, size: int, alignment: int) -> dict[str, Range]:
        """The rank's channels by name."""
        dim = self.groups.head_dim
        q, kv = self.rank_head_ranges(rank, size, alignment)
        channels = {self.q: (q[0] * dim, q[1] * dim), self.kv: (kv[0] * dim, kv[1] * dim)}
        return {**channels, self.gates: q}


@dataclass(frozen=True)
class StateHeadPartition:
    """Ranks divide the heads of a recurrence, with the heads of keys that several of them share.

    Attributes:
        module: The module that takes the rank's heads (``keep_local_heads``).
        heads: Heads with a state each (of values).
        key_heads: Heads of keys and queries.
        head_dim: Channels of the first.
        key_dim: Channels of the others.
        name, key_name: Of both in ``LinearRowBlock.split`` and ``LinearSpec.split_columns``.
    """

    module: str
    heads: int
    key_heads: int
    head_dim: int
    key_dim: int
    name: str = "state_heads"
    key_name: str = "key_heads"

    def rank_head_ranges(self, rank: int, size: int, alignment: int) -> tuple[Range, Range]:
        """The rank's heads, and the heads of keys that they read."""
        shards = partition_heads(self.heads, self.key_heads, self.head_dim, size, alignment)
        return shards[rank].q, shards[rank].kv

    @property
    def split_axis_names(self) -> tuple[str, ...]:
        """The names by which linears are divided."""
        return self.name, self.key_name

    def rank_channel_ranges(self, rank: int, size: int, alignment: int) -> dict[str, Range]:
        """The rank's channels by name."""
        (first, end), (key_first, key_end) = self.rank_head_ranges(rank, size, alignment)
        return {
            self.name: (first * self.head_dim, end * self.head_dim),
            self.key_name: (key_first * self.key_dim, key_end * self.key_dim),
        }


@dataclass(frozen=True)
class ChannelPartition:
    """Ranks divide inner channels."""

    name: str
    channels: int

    @property
    def split_axis_names(self) -> tuple[str, ...]:
        """The names by which linears are divided."""
        return (self.name,)

    def rank_channel_ranges(self, rank: int, size: int, alignment: int) -> dict[str, Range]:
        """The rank's channels by name."""
        return {self.name: partition_channels(self.channels, size, alignment)[rank]}


@dataclass(frozen=True)
class NormedChannelPartition(ChannelPartition):
    """Ranks divide inner channels that a norm reads.

    Attributes:
        module: The norm that takes the rank's channels (``keep_local_channels``).
    """

    module: str


@dataclass(frozen=True)
class ExpertPartition(ChannelPartition):
    """Ranks divide the inner channels of each expert or, in expert parallelism, whole experts.

    Attributes:
        module: The mixture that takes the rank's experts (``keep_local_experts``).
        experts: How many there are.
    """

    module: str
    experts: int

    def rank_channel_ranges(self, rank: int, size: int, alignment: int) -> dict[str, Range]:
        """The rank's channels by name."""
        try:
            return super().rank_channel_ranges(rank, size, alignment)
        except UsageError as error:
            if self.experts < size:
                raise
            raise UsageError(f"{error}, or --enable-expert-parallel to divide experts") from None

    def rank_expert_range(self, rank: int, size: int) -> Range:
        """The rank's experts.

        Raises:
            UsageError: A rank would get none.
        """
        try:
            return partition(self.experts, size, item_name="experts")[rank]
        except UsageError as error:
            raise UsageError(f"{error}, or no --enable-expert-parallel") from None


Partition = HeadPartition | StateHeadPartition | ChannelPartition
NO_PARTITIONS: tuple[()] = ()
"""The partitions of a layer that every rank computes in full.

All vision layers have it: rank 0 encodes an image and broadcasts its embeddings.
"""
