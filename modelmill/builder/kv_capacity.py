"""Memory of a sequence's KV pages, by page group, as a plan reckons with it."""

from __future__ import annotations

from typing import Any

import torch

from modelmill.core.config import RunConfig
from modelmill.core.kv_page_counts import (
    max_extra_step_pages,
    max_fitting_length,
    max_pages_between_steps,
)
from modelmill.nn.kv import ModelKVCacheSpec

MAX_STEP_TOKENS = 8192
"""Most tokens of a step that the plan reckons with."""


class KVCapacityEstimator:
    """The KV pages of sequences of a model.

    Attributes:
        token_bytes: Bytes of a token in all page groups.
    """

    def __init__(self, shape: ModelKVCacheSpec, dtype: torch.dtype) -> None:
        """Make it.

        Args:
            shape: Of the cache.
            dtype: Of its pages.
        """
        self._shape = shape
        self._page_size = RunConfig().page_size
        self._page_bytes = shape.page_bytes(self._page_size, dtype)
        self.token_bytes = shape.page_bytes(1, dtype) * len(shape.group_windows)

    def max_concurrent_sequences(self, tokens: int, room_bytes: int, state_bytes: int = 0) -> int:
        """Return how many sequences of so many tokens fit into memory.

        Args:
            tokens: Of each.
            room_bytes: Of the memory.
            state_bytes: That each takes beside its pages.
        """
        size, windows = self._page_size, self._shape.group_windows
        # without a page freed; or with those of the windows, and the tokens of one step beside them
        whole = self._page_bytes * len(windows) * -(-tokens // size)
        windowed = self._page_bytes * sum(
            self._pages_per_sequence(tokens, window) for window in windows
        )
        step = self._page_bytes * sum(
            max_extra_step_pages(MAX_STEP_TOKENS, size, each) for each in windows
        )
        return max(
            room_bytes // max(whole + state_bytes, 1),
            (room_bytes - step) // max(windowed + state_bytes, 1),
            0,
        )

    def max_sequence_length(self, max_tokens: int, room_bytes: int) -> int:
        """Return the tokens of the longest sequence that fits, at most ``max_tokens``."""
        pages = room_bytes // max(self._page_bytes, 1)
        windows = self._shape.group_windows
        return max_fitting_length(max_tokens, self._page_size, windows, MAX_STEP_TOKENS, pages)

    def describe_page_groups(self, max_tokens: int) -> list[dict[str, Any]]:
        """Return the page groups; empty where all layers share a page table.

        Each has its number of layers, its window (None: full attention), and the bytes that a
        sequence of ``max_tokens`` tokens takes in it.
        """
        return [
            {
                "layers": len(group.layers),
                "window": group.window,
                "bytes_per_sequence": self._page_bytes
                * self._pages_per_sequence(max_tokens, group.window),
            }
            for group in self._shape.groups
        ]

    def _pages_per_sequence(self, tokens: int, window: int | None) -> int:
        return max_pages_between_steps(tokens, self._page_size, window)
