"""What a page of the KV cache is.

A page holds ``page_size`` consecutive tokens of one sequence, for one layer as [kv_heads,
page_size, head_dim] for keys and the same for values, so that the keys of one head in one page lie
side by side. A slot is page · page_size + offset.

Where layers are divided into page groups (``core.page_groups``), a page is of one group: the layers
at the same place in their groups share memory, and each reads its own pages of it. Where a place
has room for several of a group's layers, the pages of these are neighbours: layer i of n sees them
from its own first page on, and its page p is number n · p there.

Keys and values are kept in the activations' dtype, or in 8 bits (int8, or fp8 e4m3) with a float32
scale for each
token and head beside the page, [kv_heads, page_size]: 4 bytes beside 64 or 128. A float16 scale
would save two of them, but has neither the range for an outlier of 1e6 nor the digits for a row of
1e-4.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from modelmill.core.page_groups import PageGroup, layer_slots_per_page, plan_page_groups

Zeros = Callable[[tuple[int, ...], torch.dtype, str], torch.Tensor]
"""Allocates zeros of a size and dtype on a device."""
QUANTIZED_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_SCALE_DTYPE = torch.float32


def kv_cache_dtype(name: str, activation_dtype: torch.dtype) -> torch.dtype:
    """What ``--kv-cache-dtype`` means: auto is the activations' dtype."""
    return QUANTIZED_KV_DTYPES.get(name, activation_dtype)


@dataclass(frozen=True)
class LayerPlaceInPage:
    """Where in a page the keys and values of a layer are.

    Attributes:
        place: The place of the page.
        index: Which of the layers that have their pages there.
        layers_per_slot: How many of them the place has room for.
        group: The page group of the layer.
    """

    place: int
    index: int = 0
    layers_per_slot: int = 1
    group: int = 0


@dataclass(frozen=True)
class ModelKVCacheSpec:
    """What a model needs of the cache.

    Attributes:
        layers: Layers with a cache.
        kv_heads: KV heads of each; where they differ, of the layer with the largest pages.
        head_dim: Channels of a head, likewise.
        keys_serve_as_values: Whether values are the keys, stored once (latent attention).
        window: The longest window, where every layer has one: pages behind it are not read again.
        sizes: (KV heads, channels of a head) of each layer; empty: all are alike.
        read_later: Layers whose pages are read by later layers, too, which have none of their own.
        layer_windows: Of each layer the window or None, where some layers have one and others not.
        caches: Of each layer of the model the place, among those with a cache, of the one that it
            reads; empty: every layer has its own.
        groups: Layers that share a page table; empty: all do.
    """

    layers: int
    kv_heads: int
    head_dim: int
    keys_serve_as_values: bool = False
    window: int | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    read_later: frozenset[int] = frozenset()
    layer_windows: tuple[int | None, ...] = ()
    caches: tuple[int, ...] = ()
    groups: tuple[PageGroup, ...] = ()

    @property
    def layer_kv_sizes(self) -> tuple[tuple[int, int], ...]:
        """(KV heads, channels of a head) of each layer."""
        return self.sizes or ((self.kv_heads, self.head_dim),) * self.layers

    def with_page_groups(self, max_tokens: int) -> ModelKVCacheSpec:
        """The shape with page groups, where they save memory.

        Args:
            max_tokens: Of the longest sequence.
        """
        sizes = [math.prod(size) for size in self.sizes]
        return replace(self, groups=plan_page_groups(self.layer_windows, max_tokens, sizes))

    @property
    def group_windows(self) -> tuple[int | None, ...]:
        """The window of each page group; None: full attention."""
        return tuple(group.window for group in self.groups) if self.groups else (self.window,)

    @property
    def page_id_strides(self) -> tuple[int, ...]:
        """Of each page group, how far apart the numbers of two pages are in its page tables."""
        return tuple(group.layers_per_slot for group in self.groups) if self.groups else (1,)

    @property
    def layer_places_in_page(self) -> tuple[LayerPlaceInPage, ...]:
        """Where in a page each layer's keys and values are."""
        if not self.groups:
            return tuple(map(LayerPlaceInPage, range(self.layers)))
        places = {
            layer: LayerPlaceInPage(
                *divmod(number, group.layers_per_slot), group.layers_per_slot, index
            )
            for index, group in enumerate(self.groups)
            for number, layer in enumerate(group.layers)
        }
        return tuple(places[layer] for layer in range(self.layers))

    @property
    def layer_page_groups(self) -> tuple[int, ...]:
        """The page group of each layer of the model; empty: all layers share one page table."""
        places = self.layer_places_in_page
        return tuple(places[i].group for i in self.caches or range(self.layers) if self.groups)

    @property
    def kv_sizes_by_place(self) -> tuple[tuple[int, int], ...]:
        """(KV heads, channels of a head) of each place of a page."""
        if not self.groups:
            return self.layer_kv_sizes
        size = self.kv_heads, self.head_dim
        if self.sizes:  # several layers of one size, or one of another
            size = 1, math.lcm(*map(math.prod, self.sizes))
        return (size,) * layer_slots_per_page(self.groups)

    @property
    def num_scale_heads_by_place_and_size(self) -> dict[tuple[int, tuple[int, int]], int]:
        """KV heads with a scale in 8-bit pages, by the place and the size of a layer.

        Layers of different sizes have scales of their own at a place, since these do not take the
        same memory where the keys and values do.
        """
        pairs = zip(self.layer_places_in_page, self.layer_kv_sizes, strict=True)
        return {(at.place, size): size[0] * at.layers_per_slot for at, size in pairs}

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over the layers of a group, with the scales of 8-bit pages."""
        token = sum(map(math.prod, self.kv_sizes_by_place)) * dtype.itemsize
        if dtype in QUANTIZED_KV_DTYPES.values():
            token += sum(self.num_scale_heads_by_place_and_size.values()) * _SCALE_DTYPE.itemsize
        return (1 if self.keys_serve_as_values else 2) * page_size * token

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token in all layers."""
        return replace(self, groups=()).page_bytes(1, dtype)


NO_KV = ModelKVCacheSpec(0, 0, 0)
"""Of a model without attention: its pages take no memory, and only number the tokens."""


@dataclass(frozen=True)
class KVCache:
    """The pages of the layers with a cache, in their order.

    k[i], v[i]: [pages, kv_heads, page_size, head_dim].

    k_scale, v_scale: [pages, kv_heads, page_size] float32 of each layer where the pages hold 8
    bits, else empty.

    layer_groups: The page group of each layer of the model; empty: all layers share one page table.

    stored: What these are views of, [pages, …] each; empty: of nothing else.
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    page_size: int
    k_scale: tuple[torch.Tensor, ...] = ()
    v_scale: tuple[torch.Tensor, ...] = ()
    layer_groups: tuple[int, ...] = ()
    stored: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def allocate(
        shape: ModelKVCacheSpec,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        *,
        zeros: Zeros | None = None,
    ) -> KVCache:
        """Zeroed pages, so that nothing reads uninitialized memory.

        In RAM they are backed once they are written. ``zeros`` allocates; None:
        ``lazily_backed_zeros``.
        """
        allocate = lazily_backed_zeros if zeros is None else zeros
        quantized = dtype in QUANTIZED_KV_DTYPES.values()
        sides = range(1 if shape.keys_serve_as_values else 2)

        rooms = [
            [
                allocate((pages, heads, page_size, dim), dtype, device)
                for heads, dim in shape.kv_sizes_by_place
            ]
            for _ in sides
        ]
        scales = [
            {
                key: allocate((pages, heads, page_size), _SCALE_DTYPE, device)
                for key, heads in (
                    shape.num_scale_heads_by_place_and_size.items() if quantized else ()
                )
            }
            for _ in sides
        ]
        keys, *values = [_pages_by_layer(shape, side, page_size) for side in rooms]
        key_scales, *value_scales = [_scales_by_layer(shape, side, page_size) for side in scales]
        return KVCache(
            keys,
            values[0] if values else keys,
            page_size,
            key_scales,
            value_scales[0] if value_scales else key_scales,
            shape.layer_page_groups,
            (*chain(*rooms), *chain(*(side.values() for side in scales))),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that pages hold, each [pages, …]: what copying a page copies."""
        stored = self.stored or (*self.k, *self.v, *self.k_scale, *self.v_scale)
        # keys may be the values
        return tuple({id(tensor): tensor for tensor in stored}.values())

    @property
    def keys_serve_as_values(self) -> bool:
        """Whether values are the keys, stored once."""
        return bool(self.k) and self.v is self.k

    @property
    def num_pages_per_layer(self) -> int:
        """Number of KV pages per layer."""
        return self.tensors[0].shape[0] if self.k else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """One layer's scales of keys and of values; None where the pages need none."""
        return (self.k_scale[layer], self.v_scale[layer]) if self.k_scale else (None, None)


def _pages_by_layer(
    shape: ModelKVCacheSpec, rooms: Sequence[torch.Tensor], page_size: int
) -> tuple[torch.Tensor, ...]:
    """Each layer's keys (or values) in the memory of the places."""
    return tuple(
        rooms[at.place].view(-1, heads, page_size, dim)[at.index :]
        for at, (heads, dim) in zip(shape.layer_places_in_page, shape.layer_kv_sizes, strict=True)
    )


def _scales_by_layer(
    shape: ModelKVCacheSpec,
    rooms: Mapping[tuple[int, tuple[int, int]], torch.Tensor],
    page_size: int,
) -> tuple[torch.Tensor, ...]:
    """Each layer's scales, by place and size of a layer; none without any."""
    if not rooms:
        return ()
    return tuple(
        rooms[at.place, size].view(-1, size[0], page_size)[at.index :]
        for at, size in zip(shape.layer_places_in_page, shape.layer_kv_sizes, strict=True)
    )


def lazily_backed_zeros(size: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
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
