"""Page groups: which layers of a model with windows and full attention share KV pages.

Layers with the same window need the same pages of a sequence, so they share a page table, a *page
group*. Groups have as many layers each, so that a page of any of them takes the same memory and
all come from one pool, which follows the sequences: short ones use as many pages in every group,
long ones mostly those of full attention. A kind of layers with more members than a group has
several groups; a group with fewer members leaves a part of its pages unused.

Layers whose keys differ in size (Gemma 4) are of different groups. A page is divided into *places*,
each with room for one layer of the one size, or for two or more of another: so many pages of such a
layer stand in the place, and the page tables of its group have numbers that are as many times as
large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_PAGE_GROUPS = 8
"""Most groups of a model: each step copies a page table of every group to the device."""
PLANNED_LENGTH_IN_WINDOWS = 8
"""Length of the sequences that the groups are made for, in windows, unless the longest is less."""
MAX_GROUPED_MEMORY_SHARE = 0.9
"""Groups are made if such a sequence takes at most this share of the memory without them."""


@dataclass(frozen=True)
class PageGroup:
    """Layers that share a page table.

    Attributes:
        layers: Their places among the layers with a cache.
        window: Tokens that a query attends to in them; None: all.
        layers_per_slot: Layers at a place of a page, which has room for so many of this group's.
    """

    layers: tuple[int, ...]
    window: int | None
    layers_per_slot: int = 1

    @property
    def num_layer_slots(self) -> int:
        """Places of a page that the layers take."""
        return -(-len(self.layers) // self.layers_per_slot)


def plan_page_groups(
    windows: Sequence[int | None], max_tokens: int, sizes: Sequence[int] = ()
) -> tuple[PageGroup, ...]:
    """Divide layers into page groups.

    Args:
        windows: Of each layer with a cache; None: full attention.
        max_tokens: Of the longest sequence.
        sizes: Channels of each layer's keys; empty: all have as many.

    Returns:
        Groups of equal size but for the last of each window, those that keep most pages first;
        empty: one group of all layers takes as little.
    """
    sized = [window for window in windows if window is not None]
    if not sized or len(set(windows)) == 1:
        return ()
    sizes = sizes or (1,) * len(windows)
    place = math.lcm(*sizes)
    alike: dict[tuple[int | None, int], list[int]] = {}
    for layer, each in enumerate(zip(windows, sizes, strict=True)):
        alike.setdefault(each, []).append(layer)
    tokens = min(max_tokens, PLANNED_LENGTH_IN_WINDOWS * max(sized))
    in_order = sorted(alike.items(), key=lambda item: -_kept_token_count(item[0][0], 1 << 62))
    members = [(layers, window, place // size) for (window, size), layers in in_order]
    choices = [
        _split_into_page_groups(members, places)
        for places in range(1, max(-(-len(layers) // per) for layers, _, per in members) + 1)
    ]
    memory_and_groups = [
        (
            place
            * layer_slots_per_page(groups)
            * sum(_kept_token_count(g.window, tokens) for g in groups),
            len(groups),
        )
        for groups in choices
    ]
    best = min(
        (index for index, (_, count) in enumerate(memory_and_groups) if count <= MAX_PAGE_GROUPS),
        key=lambda index: memory_and_groups[index],
        default=None,
    )
    if best is None or memory_and_groups[best][0] > MAX_GROUPED_MEMORY_SHARE * sum(sizes) * tokens:
        return ()
    return choices[best]


def layer_slots_per_page(groups: Sequence[PageGroup]) -> int:
    """Places of a page: those of the largest group."""
    return max(group.num_layer_slots for group in groups)


def sum_group_counts_by_window(
    windows: Iterable[int | None], counts: Iterable[int]
) -> dict[int | None, int]:
    """What is counted of each page group, summed over the groups of one window.

    Args:
        windows: Of each group.
        counts: Of each group.
    """
    sums: dict[int | None, int] = {}
    for window, count in zip(windows, counts, strict=True):
        sums[window] = sums.get(window, 0) + count
    return sums


def _kept_token_count(window: int | None, tokens: int) -> int:
    return tokens if window is None else min(window, tokens)


def _split_into_page_groups(
    members: Iterable[tuple[list[int], int | None, int]], places: int
) -> tuple[PageGroup, ...]:
    """Groups that take at most so many places, of (layers that are alike, window, per place)."""
    return tuple(
        PageGroup(tuple(layers[start : start + places * layers_per_slot]), window, layers_per_slot)
        for layers, window, layers_per_slot in members
        for start in range(0, len(layers), places * layers_per_slot)
    )
