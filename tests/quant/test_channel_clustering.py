"""Channels in clusters: k-means, and the fit into groups of one width."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.quant.channel_clustering import cluster_channels, kmeans


def test_kmeans_finds_clusters_that_are_there() -> None:
    generator = np.random.default_rng(0)
    centres = np.array([[0.0, 0.0], [10.0, -10.0], [1.0, -8.0], [30.0, 0.0]])
    truth = generator.integers(4, size=200)
    labels = kmeans(centres[truth] + generator.normal(size=(200, 2)) * 0.1, 4)
    pairs = set(zip(truth.tolist(), labels.tolist(), strict=True))
    assert len(pairs) == 4


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 150),
    st.sampled_from([32, 64]),
    st.integers(0, 3),
    st.integers(0, 1000),
    st.sampled_from(["normal", "same", "zero", "tailed"]),
)
def test_every_channel_has_one_column(
    columns: int, unit: int, spare: int, seed: int, input_range: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    high = torch.rand(columns, generator=generator)
    if input_range == "same":
        high = torch.ones(columns)
    elif input_range == "zero":
        high = torch.zeros(columns)
    elif input_range == "tailed":
        high = high**-3.0
    groups = -(-columns // unit) + spare
    order = cluster_channels(-high, high * 0.5, torch.ones(columns), unit, groups)
    assert len(order) == unit * groups
    assert sorted(order[order >= 0].tolist()) == list(range(columns))


def test_outlier_channels_get_clusters_of_their_own() -> None:
    generator = torch.Generator().manual_seed(1)
    size = torch.rand(576, generator=generator) + 0.5
    size[[7, 300]] = torch.tensor([30.0, 90.0])
    order = cluster_channels(-size, size, torch.ones(576), 32, 21).view(21, 32)
    for channel in (7, 300):
        mates = next(row for row in order if channel in row.tolist())
        assert mates[mates >= 0].tolist() == [channel]


def test_it_is_the_same_twice() -> None:
    size = torch.rand(100, generator=torch.Generator().manual_seed(2))
    assert torch.equal(*(cluster_channels(-size, size, size, 32, 5) for _ in range(2)))
