"""Slices cover everything once, start at grains, and differ by one alignment at most."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelmill.core.errors import UsageError
from modelmill.nn.attention import AttentionSpec
from modelmill.nn.layer_spec import LinearSpec
from modelmill.parallel.shard import Shard, partition, partition_heads, range_lengths


@given(
    count=st.integers(1, 5000),
    size=st.integers(1, 16),
    alignment=st.sampled_from([1, 8, 16, 32, 64, 128]),
)
def test_ranges_cover_disjoint_and_aligned(count: int, size: int, alignment: int) -> None:
    units = -(-count // alignment)
    if units < size:
        with pytest.raises(UsageError, match=f"--tp {units} or less"):
            partition(count, size, alignment)
        return
    parts = partition(count, size, alignment)
    assert len(parts) == size
    assert parts[0][0] == 0
    assert parts[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(parts))
    assert all(start % alignment == 0 and stop > start for start, stop in parts)
    assert max(range_lengths(parts)) - min(range_lengths(parts)) < 2 * alignment


@given(
    kv=st.integers(1, 12), group=st.integers(1, 12), dim=st.sampled_from([8, 64, 80, 128]),
    size=st.integers(1, 16), alignment=st.sampled_from([1, 16, 32, 64, 128]),
)  # fmt: skip
def test_heads_cover_and_read_what_they_hold(
    kv: int, group: int, dim: int, size: int, alignment: int
) -> None:
    heads = kv * group
    try:
        parts = partition_heads(heads, kv, dim, size, alignment)
    except UsageError:
        assert size > 1
        assert alignment > 1 or size > heads
        return
    assert [h for part in parts for h in range(*part.q)] == list(range(heads))
    for part in parts:
        assert part.q[0] * dim % alignment == 0
        kv_heads = range(*part.kv)
        # the kernels give each KV head the same number of query heads, in order
        share = (part.q[1] - part.q[0]) // len(kv_heads)
        assert [h // group for h in range(*part.q)] == [
            kv_heads[i // share] for i in range(share * len(kv_heads))
        ]
    covered = [h for part in parts for h in range(*part.kv)]
    assert set(covered) == set(range(kv))
    assert len(covered) == max(kv, size)


def test_rows_of_a_fused_projection() -> None:
    """SmolLM2: 9 heads of 64, 3 KV heads."""
    two = partition_heads(9, 3, 64, 2)
    assert [p.q for p in two] == [(0, 6), (6, 9)]
    spec = AttentionSpec(576, 9, 3, 64)
    assert spec.partition.rank_channel_ranges(1, 2, 1) == {
        "q_heads": (384, 576),
        "kv_heads": (128, 192),
        "head_gates": (6, 9),
    }
    qkv = spec.module_specs()[0]
    assert isinstance(qkv, LinearSpec)
    assert [qkv.part_row_range(name) for name in "qkv"] == [(0, 576), (576, 768), (768, 960)]
    four = partition_heads(9, 3, 64, 4)
    assert [(p.q, p.kv) for p in four] == [
        ((0, 2), (0, 1)),
        ((2, 3), (0, 1)),
        ((3, 6), (1, 2)),
        ((6, 9), (2, 3)),
    ]


def test_parts_of_matrices() -> None:
    rows = Shard.from_rows((10, 4), (0, 3), (5, 8))
    assert (rows.shape, rows.columns, rows.has_bias) == ((6, 4), (0, 4), True)
    assert Shard.from_columns((10, 4), (1, 3), rank=1) == Shard(
        (10, 4), ((0, 10),), (1, 3), has_bias=False
    )
    assert Shard.from_columns((10, 4), (0, 1), rank=0).has_bias
