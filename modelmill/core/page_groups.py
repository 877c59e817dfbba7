"""Page groups: which layers of a model with windows and full attention share KV pages.

Layers with the same window need the same pages of a sequence, so they share a page table, a *page
group*. Groups have as many layers each, so that a page of any of them takes the same memory and
all come from one pool, which follows the sequences: short ones use as many pages in every group,
long ones mostly those of full attention. A kind of layers with more members than a group has
several groups; a group with fewer members leaves a part of its pages unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_PAGE_GROUPS = 8
"""Most groups of a model: each step copies a page table of every group to the device."""
PLANNED_WINDOWS = 8
"""Length of the sequences that the groups are made for, in windows, unless the longest is less."""
MAX_MEMORY_SHARE = 0.9
"""Groups are made if such a sequence takes at most this share of the memory without them."""


@dataclass(frozen=True)
class PageGroup:
    """Layers that share a page table.

    Attributes:
        layers: Their places among the layers with a cache.
        window: Tokens that a query attends to in them; None: all.
    """

    layers: tuple[int, ...]
    window: int | None


def plan_page_groups(windows: Sequence[int | None], max_tokens: int) -> tuple[PageGroup, ...]:
    """Divide layers into page groups.

    Args:
        windows: Of each layer with a cache; None: full attention.
        max_tokens: Of the longest sequence.

    Returns:
        Groups of equal size but for the last of each window, those that keep most pages first;
        empty: one group of all layers takes as little.
    """
    sized = [window for window in windows if window is not None]
    if not sized or len(set(windows)) == 1:
        return ()
    layers_by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_by_window.setdefault(window, []).append(layer)
    tokens = min(max_tokens, PLANNED_WINDOWS * max(sized))
    in_order = sorted(layers_by_window.items(), key=lambda item: -_kept_tokens(item[0], 1 << 62))
    choices = [
        _groups_of_size(in_order, size)
        for size in range(1, max(map(len, layers_by_window.values())) + 1)
    ]
    memory_and_groups = [
        (page_layers(groups) * sum(_kept_tokens(g.window, tokens) for g in groups), len(groups))
        for groups in choices
    ]
    best = min(
        (index for index, (_, count) in enumerate(memory_and_groups) if count <= MAX_PAGE_GROUPS),
        key=lambda index: memory_and_groups[index],
        default=None,
    )
    if best is None or memory_and_groups[best][0] > MAX_MEMORY_SHARE * len(windows) * tokens:
        return ()
    return choices[best]


def page_layers(groups: Sequence[PageGroup]) -> int:
    """Layers that a page has room for: those of the largest group."""
    return max(len(group.layers) for group in groups)


def sum_by_window(windows: Iterable[int | None], counts: Iterable[int]) -> dict[int | None, int]:
    """What is counted of each page group, summed over the groups of one window.

    Args:
        windows: Of each group.
        counts: Of each group.
    """
    sums: dict[int | None, int] = {}
    for window, count in zip(windows, counts, strict=True):
        sums[window] = sums.get(window, 0) + count
    return sums


def _kept_tokens(window: int | None, tokens: int) -> int:
    return tokens if window is None else min(window, tokens)


def _groups_of_size(
    layers_by_window: Iterable[tuple[int | None, list[int]]], size: int
) -> tuple[PageGroup, ...]:
    return tuple(
        PageGroup(tuple(layers[start : start + size]), window)
        for window, layers in layers_by_window
        for start in range(0, len(layers), size)
    )
