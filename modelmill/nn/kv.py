"""What a page of the KV cache is.

A page holds ``page_size`` consecutive tokens of one sequence, for one layer as [kv_heads, page_size, head_dim] for keys
and the same for values, so that the keys of one head in one page lie side by side. A slot is page · page_size + offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVShape:
    """What a model needs of the cache: one entry per layer would differ only in content."""

    layers: int
    kv_heads: int
    head_dim: int

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * page_size * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class KVCache:
    """The pages of all layers: k[layer], v[layer] of [pages, kv_heads, page_size, head_dim]."""

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    page_size: int

    @staticmethod
    def allocate(shape: KVShape, pages: int, page_size: int, dtype: torch.dtype, device: str) -> KVCache:
        """Zeroed pages, so that nothing reads what nobody wrote."""
        size = (pages, shape.kv_heads, page_size, shape.head_dim)
        k = tuple(torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers))
        v = tuple(torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers))
        return KVCache(k, v, page_size)

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.k[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))
