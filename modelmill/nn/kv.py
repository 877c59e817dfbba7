"""What a page of the KV cache is.

A page holds ``page_size`` consecutive tokens of one sequence, for one layer as [kv_heads,
page_size, head_dim] for keys and the same for values, so that the keys of one head in one page lie
side by side. A slot is page · page_size + offset.

Keys and values are kept in the activations' dtype, or in 8 bits (int8, or fp8 e4m3) with a float32
scale for each
token and head beside the page, [kv_heads, page_size]: 4 bytes beside 64 or 128. A float16 scale
would save two of them, but has neither the range for an outlier of 1e6 nor the digits for a row of
1e-4.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

QUANTIZED_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_SCALE_DTYPE = torch.float32


def kv_cache_dtype(name: str, activation_dtype: torch.dtype) -> torch.dtype:
    """What ``--kv-cache-dtype`` means: auto is the activations' dtype."""
    return QUANTIZED_KV_DTYPES.get(name, activation_dtype)


@dataclass(frozen=True)
class KVShape:
    """What a model needs of the cache.

    Attributes:
        layers: Layers with a cache.
        kv_heads: KV heads of each; where they differ, of the layer with the largest pages.
        head_dim: Channels of a head, likewise.
        shares_values: Whether values are the keys, stored once (latent attention).
        window: The longest window, where every layer has one: pages behind it are not read again.
        sizes: (KV heads, channels of a head) of each layer; empty: all are alike.
        read_later: Layers whose pages are read by later layers, too, which have none of their own.
    """

    layers: int
    kv_heads: int
    head_dim: int
    shares_values: bool = False
    window: int | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    read_later: frozenset[int] = frozenset()

    @property
    def layer_sizes(self) -> tuple[tuple[int, int], ...]:
        """(KV heads, channels of a head) of each layer."""
        return self.sizes or ((self.kv_heads, self.head_dim),) * self.layers

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers, keys and values, with the scales of 8-bit pages."""
        scale = _SCALE_DTYPE.itemsize if dtype in QUANTIZED_KV_DTYPES.values() else 0
        token = sum(heads * (dim * dtype.itemsize + scale) for heads, dim in self.layer_sizes)
        return (1 if self.shares_values else 2) * page_size * token


NO_KV = KVShape(0, 0, 0)
"""Of a model without attention: its pages take no memory, and only number the tokens."""


@dataclass(frozen=True)
class KVCache:
    """The pages of the layers with a cache, in their order.

    k[i], v[i]: [pages, kv_heads, page_size, head_dim].

    k_scale, v_scale: [pages, kv_heads, page_size] float32 of each layer where the pages hold 8
    bits, else empty.
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    page_size: int
    k_scale: tuple[torch.Tensor, ...] = ()
    v_scale: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def allocate(
        shape: KVShape, pages: int, page_size: int, dtype: torch.dtype, device: str
    ) -> KVCache:
        """Zeroed pages, so that nothing reads uninitialized memory.

        In RAM they are backed once they are written.
        """
        sizes = [(pages, heads, page_size, dim) for heads, dim in shape.layer_sizes]

        def zeros(sizes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
            return tuple(zeros_without_writing(size, dtype, device) for size in sizes)

        def pair(
            sizes: Sequence[tuple[int, ...]], dtype: torch.dtype
        ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
            keys = zeros(sizes, dtype)
            return keys, keys if shape.shares_values else zeros(sizes, dtype)

        quantized = dtype in QUANTIZED_KV_DTYPES.values()
        scales = [size[:3] for size in sizes] if quantized else []
        k_scale, v_scale = pair(scales, _SCALE_DTYPE)
        return KVCache(*pair(sizes, dtype), page_size, k_scale, v_scale)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that pages hold, each [pages, …]: what copying a page copies."""
        if self.k is self.v:
            return (*self.k, *self.k_scale)
        return (*self.k, *self.v, *self.k_scale, *self.v_scale)

    @property
    def pages(self) -> int:
        """Number of KV pages per layer."""
        return self.k[0].shape[0] if self.k else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """One layer's scales of keys and of values; None where the pages need none."""
        return (self.k_scale[layer], self.v_scale[layer]) if self.k_scale else (None, None)


def zeros_without_writing(size: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros without writing them.

    On a CPU ``torch.zeros`` may write every byte; fresh pages of the operating system are zero.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    count = math.prod(size)
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    )
    pages = mmap.mmap(-1, max(count, 1) * dtype.itemsize, **private)
    return torch.frombuffer(pages, dtype=dtype)[:count].view(size)
