"""Regions of masks against a flood fill written here, and the generator's rules by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.vision.regions import label_regions, remove_small_regions
from tests.hypothesis_examples import examples


def grids(most: int = 9) -> st.SearchStrategy[np.ndarray]:
    sides = st.tuples(st.integers(1, most), st.integers(1, most))
    return sides.flatmap(
        lambda s: st.lists(st.booleans(), min_size=s[0] * s[1], max_size=s[0] * s[1]).map(
            lambda bits: np.array(bits, dtype=bool).reshape(s)
        )
    )


def flooded(mask: np.ndarray) -> tuple[np.ndarray, list[int]]:
    labels = np.zeros(mask.shape, dtype=np.int64)
    sizes: list[int] = []
    for y, x in np.argwhere(mask):
        if labels[y, x]:
            continue
        sizes.append(0)
        left = [(y, x)]
        labels[y, x] = len(sizes)
        while left:
            a, b = left.pop()
            sizes[-1] += 1
            for i in range(max(0, a - 1), min(mask.shape[0], a + 2)):
                for j in range(max(0, b - 1), min(mask.shape[1], b + 2)):
                    if mask[i, j] and not labels[i, j]:
                        labels[i, j] = len(sizes)
                        left.append((i, j))
    return labels, sizes


@settings(deadline=None, max_examples=examples(300, 60))
@given(grids())
def test_regions_are_those_of_a_flood_fill(mask: np.ndarray) -> None:
    labels, sizes = label_regions(mask)
    expected, pixels = flooded(mask)
    assert np.array_equal(labels, expected)
    assert sizes.tolist() == pixels


@settings(deadline=None, max_examples=examples(200, 60))
@given(grids(), st.integers(0, 12))
def test_small_regions_go(mask: np.ndarray, least: int) -> None:
    actual, changed = remove_small_regions(mask, least)
    labels, sizes = flooded(~mask)
    filled = mask | np.isin(labels, [i + 1 for i, size in enumerate(sizes) if size < least])
    labels, islands = flooded(filled)
    labels_to_keep = [i + 1 for i, size in enumerate(islands) if size >= least]
    if islands and not labels_to_keep:
        labels_to_keep = [1 + int(np.argmax(islands))]
    assert np.array_equal(actual, np.isin(labels, labels_to_keep))
    expected_change = any(size < least for size in sizes) or any(size < least for size in islands)
    assert changed == expected_change


def test_a_hole_is_filled_and_an_island_dropped() -> None:
    picture = ["##### ..", "#.#.# #.", "##### ..", "........"]
    mask = np.array([[c == "#" for c in row.ljust(8)] for row in picture])
    actual, changed = remove_small_regions(mask, 3)
    assert changed
    assert ["".join(".#"[int(p)] for p in row) for row in actual] == [
        "#####...",
        "#####...",
        "#####...",
        "........",
    ]
    assert not remove_small_regions(mask, 1)[1]
