"""Memory of an engine that sleeps: its addresses stay while the memory behind them is given back.

Weights and KV cache lie in regions. ``sleep`` copies the weights to host memory (pinned, for a
GPU), drops the KV cache and gives the memory of all regions back; ``wake_up`` puts memory behind
the same addresses and copies the weights back. Since no address changes, captured CUDA graphs,
bound kernels and tensors stay valid, and nothing is captured again.

Waking up takes what the copy takes, since everything else is mapped meanwhile and no memory of the
host is freed: of 14.2 GB at 55 GB/s 0.26 s.

On a CPU a region is anonymous memory, which the operating system takes back; weights and their copy
take the same kind of memory there, so that only the KV cache is saved.
"""

from __future__ import annotations

import math
import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from modelmill.core.errors import CapacityError, UsageError
from modelmill.loader.cuda_vmm import CudaDriver
from modelmill.loader.pinned_blocks import PinnedBlocks
from modelmill.loader.reachable_tensors import reachable_tensors

ALLOCATION_ALIGNMENT_BYTES = 512
"""Bytes to which a weight is aligned, as torch's allocator does."""
MAP_CHUNK_BYTES = 256 << 20
"""Of a GPU's memory that is mapped at once where tensors move into it, part by part."""
WAKE_CHUNK_BYTES = 1 << 30
"""The same where an engine wakes up: one part is copied while the next is mapped."""


class MemoryRegion(ABC):
    """Bytes at addresses that stay.

    Attributes:
        bytes: [nbytes] uint8; valid while the region has memory.
    """

    bytes: torch.Tensor

    @abstractmethod
    def extend_backing(self, nbytes: int) -> None:
        """Put memory behind the first ``nbytes`` bytes."""

    @abstractmethod
    def offload(self) -> int:
        """Copy to the host and give the memory back; returns the bytes that the copy takes."""

    @abstractmethod
    def restore(self) -> None:
        """Take memory again, and start to copy the content that was offloaded."""

    @abstractmethod
    def free_host_copy(self) -> None:
        """Free the host's copy, once everything is copied."""

    @abstractmethod
    def drop(self) -> None:
        """Give the memory back, and forget the content."""

    @abstractmethod
    def reallocate(self) -> None:
        """Take memory again, with zeros."""


class CpuRegion(MemoryRegion):
    """Anonymous memory of the host."""

    def __init__(self, nbytes: int) -> None:
        if not hasattr(mmap, "MADV_DONTNEED"):
            raise UsageError("sleep mode on a CPU needs Linux")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, max(nbytes, 1), flags=flags)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)[:nbytes]
        self._copy: torch.Tensor | None = None

    def extend_backing(self, nbytes: int) -> None:
        """Nothing: the system does so when a page is written."""

    def offload(self) -> int:
        """As of MemoryRegion."""
        self._copy = self.bytes.clone()
        self.drop()
        return self._copy.numel()

    def restore(self) -> None:
        """As of MemoryRegion."""
        if self._copy is not None:
            self.bytes.copy_(self._copy)

    def free_host_copy(self) -> None:
        """As of MemoryRegion."""
        self._copy = None

    def drop(self) -> None:
        """As of MemoryRegion."""
        self._pages.madvise(mmap.MADV_DONTNEED)

    def reallocate(self) -> None:
        """Nothing: pages that were given back are read as zeros."""


class _MappedRange:
    """Reserved addresses of a GPU, of which the first ``mapped`` bytes have memory.

    ``has_copy``: the host has their content, while they sleep.
    """

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        unit = driver.granularity
        self.driver = driver
        self.nbytes = max(-(-nbytes // unit), 1) * unit
        self.mapped = 0
        self.has_copy = False
        self._chunks: list[int] = []  # bytes of each mapping
        self._host = PinnedBlocks(driver, self.nbytes)
        self.address = driver.reserve(self.nbytes)

    def map_chunk(self, nbytes: int) -> int:
        """Map the next bytes, at most ``nbytes``; returns where they begin."""
        unit = self.driver.granularity
        first = self.mapped
        size = min(max(nbytes // unit, 1) * unit, self.nbytes - first)
        self.driver.map(self.address + first, size)
        self._chunks.append(size)
        self.mapped += size
        return first

    def unmap(self) -> None:
        """Give all memory back, once nothing uses it."""
        self.driver.synchronize()
        while self._chunks:
            size = self._chunks.pop()
            self.mapped -= size
            self.driver.unmap(self.address + self.mapped, size)

    def copy_to_host_async(self) -> None:
        """Start to copy the content; nothing if it was not restored since the last time.

        Raises:
            CapacityError: the host has not so much left.
        """
        if self.has_copy:
            return
        first = 0
        for block in self._host.pin_and_yield_blocks():
            self.driver.copy_to_host_async(block.address, self.address + first, block.nbytes)
            first += block.nbytes
        self.has_copy = True

    def copy_to_device_async(self) -> None:
        """Map everything, and start to copy the content meanwhile."""
        first = 0
        for block in self._host.pinned_blocks():
            offset = 0
            while offset < block.nbytes:
                if first + offset == self.mapped:
                    self.map_chunk(WAKE_CHUNK_BYTES)
                count = min(block.nbytes - offset, self.mapped - first - offset)
                where = self.address + first + offset
                self.driver.copy_to_device_async(where, block.address + offset, count)
                offset += count
            first += block.nbytes

    def free_host_copy(self) -> None:
        """Free the copy, if there is one, a while later."""
        if self.has_copy:
            self.has_copy = False
            self._host.release_in_background()

    def close(self) -> None:
        """Give memory and addresses back; a garbage collector calls it on any thread."""
        self.driver.make_current()
        self.unmap()
        self._host.release()
        self.driver.free_addresses(self.address, self.nbytes)


class _ArrayInterface:
    """What torch makes a tensor of without a copy; the addresses are free when both are gone."""

    def __init__(self, addresses: _MappedRange) -> None:
        self.__cuda_array_interface__ = {
            "shape": (addresses.nbytes,),
            "typestr": "|u1",
            "data": (addresses.address, False),
            "version": 3,
        }
        weakref.finalize(self, addresses.close).atexit = False


class CudaRegion(MemoryRegion):
    """Memory of a GPU, mapped in chunks at reserved addresses."""

    def __init__(self, driver: CudaDriver, nbytes: int, device: str) -> None:
        self._driver = driver
        self._addresses = _MappedRange(driver, nbytes)
        self._addresses.map_chunk(MAP_CHUNK_BYTES)  # torch asks whose memory the first byte is
        self.bytes = as_device_tensor(_ArrayInterface(self._addresses), device)[:nbytes]

    def extend_backing(self, nbytes: int) -> None:
        """As of MemoryRegion."""
        while self._addresses.mapped < min(nbytes, self._addresses.nbytes):
            self._addresses.map_chunk(MAP_CHUNK_BYTES)

    def offload(self) -> int:
        """As of MemoryRegion."""
        driver, addresses = self._driver, self._addresses
        driver.synchronize()
        addresses.copy_to_host_async()
        addresses.unmap()
        return addresses.nbytes

    def restore(self) -> None:
        """As of MemoryRegion; after a CapacityError ``offload`` gives back what it took."""
        if self._addresses.has_copy:
            self._addresses.copy_to_device_async()

    def free_host_copy(self) -> None:
        """As of MemoryRegion; nothing is copied any more."""
        self._addresses.free_host_copy()

    def drop(self) -> None:
        """As of MemoryRegion."""
        self._addresses.unmap()

    def reallocate(self) -> None:
        """As of MemoryRegion; what has no memory yet is mapped in one call."""
        addresses = self._addresses
        if addresses.mapped < addresses.nbytes:
            addresses.map_chunk(addresses.nbytes - addresses.mapped)
        self._driver.set_zero(self._addresses.address, self._addresses.nbytes)


def as_device_tensor(interface: object, device: str) -> torch.Tensor:
    """A tensor [bytes] uint8 of memory that torch did not allocate."""
    return torch.as_tensor(interface, device=device)


class SleepableMemory:
    """The regions of one engine core on one rank.

    Attributes:
        is_asleep: whether the memory was given back.
        host_bytes: that offloaded weights take; 0 while it is awake.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._driver: CudaDriver | None = None
        self._weights: list[MemoryRegion] = []
        self._caches: list[MemoryRegion] = []
        self.is_asleep = False
        self.host_bytes = 0
        if device != "cpu":
            torch.zeros(1, device=device)  # makes the context, and makes it current
            index = torch.device(device).index
            self._driver = CudaDriver(torch.cuda.current_device() if index is None else index)

    def allocate_cache_zeros(
        self,
        size: tuple[int, ...],
        dtype: torch.dtype,
        device: str,  # noqa: ARG002
    ) -> torch.Tensor:
        """Zeros that sleep forgets: after waking up they are zeros again."""
        region = self._new_region(math.prod(size) * dtype.itemsize)
        region.reallocate()
        self._caches.append(region)
        return region.bytes.view(dtype).view(size)

    def move_tensors_in(self, roots: Iterable[object]) -> int:
        """Move all tensors that modules hold into a region, which sleep offloads.

        The tensor objects stay, so that everything that holds one sees the new memory. Memory is
        taken part by part, and the old one is given back meanwhile. Of a file that tensors view,
        what none of them reads stays where it is, as other ranks' weights.

        Args:
            roots: modules, with everything that they hold.

        Returns:
            The bytes.
        """
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in reachable_tensors(roots):
            if tensor.device.type == torch.device(self._device).type and tensor.numel():
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        extents = [each for tensors in by_storage.values() for each in _storage_extents(tensors)]
        by_storage.clear()
        region = self._new_region(sum(each.nbytes for each in extents))
        self._weights.append(region)
        start, freed = 0, 0
        while extents:
            size = extents[0].nbytes
            region.extend_backing(start + size)
            _move_extent(extents.pop(0), region.bytes, start)
            start, freed = start + size, freed + size
            if self._driver is not None and (freed >= MAP_CHUNK_BYTES or not extents):
                torch.cuda.empty_cache()  # for the next chunk
                freed = 0
        return start

    def sleep(self) -> None:
        """Give all memory back; the weights take the host's meanwhile.

        Raises:
            CapacityError: the host has not so much left; nothing was given back.
        """
        if self._driver is not None:
            self._driver.make_current()
        self.host_bytes = sum([region.offload() for region in self._weights])
        for region in self._caches:
            region.drop()
        self.is_asleep = True
        if self._driver is not None:
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Take the memory again.

        Raises:
            CapacityError: the GPU has not so much left; nothing of it was taken.
        """
        if self._driver is not None:
            self._driver.make_current()
            torch.cuda.empty_cache()
        try:
            for region in self._weights:
                region.restore()
            for region in self._caches:  # while the weights are copied
                region.reallocate()
        except CapacityError:
            self.sleep()
            raise
        if self._driver is not None:
            self._driver.synchronize()
        for region in self._weights:
            region.free_host_copy()
        self.is_asleep, self.host_bytes = False, 0

    def _new_region(self, nbytes: int) -> MemoryRegion:
        if self._driver is None:
            return CpuRegion(nbytes)
        return CudaRegion(self._driver, nbytes, self._device)


def _align_up(nbytes: int) -> int:
    return -(-nbytes // ALLOCATION_ALIGNMENT_BYTES) * ALLOCATION_ALIGNMENT_BYTES


@dataclass
class _Extent:
    """Bytes of a storage that tensors view, from ``first`` to ``end``; both are aligned."""

    first: int
    end: int
    tensors: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return self.end - self.first

    def add(self, tensor: torch.Tensor, end: int) -> None:
        """Take a tensor that begins inside and ends before ``end``."""
        self.end = max(self.end, end)
        self.tensors.append(tensor)


def _storage_extents(tensors: list[torch.Tensor]) -> list[_Extent]:
    """The parts of a storage that its tensors view; those that overlap are one."""
    extents: list[_Extent] = []
    for tensor in sorted(tensors, key=lambda each: each.storage_offset() * each.itemsize):
        begin = int(tensor.storage_offset()) * tensor.itemsize
        steps = zip(tensor.size(), tensor.stride(), strict=True)
        last_element = sum((size - 1) * stride for size, stride in steps)
        end = _align_up(begin + (last_element + 1) * tensor.itemsize)
        first = begin // ALLOCATION_ALIGNMENT_BYTES * ALLOCATION_ALIGNMENT_BYTES
        if extents and first < extents[-1].end:
            extents[-1].add(tensor, end)
        else:
            extents.append(_Extent(first, end, [tensor]))
    return extents


@torch.inference_mode()
def _move_extent(extent: _Extent, target: torch.Tensor, start: int) -> None:
    """Copy a part of a storage to ``target`` from byte ``start`` on."""
    storage = extent.tensors[0].untyped_storage()
    source = torch.empty(0, dtype=torch.uint8, device=target.device).set_(storage)
    source = source[
        extent.first : extent.end
    ]  # a storage may end before a multiple of the alignment
    target[start : start + len(source)].copy_(source)
    moved = target.storage_offset() + start - extent.first
    for tensor in extent.tensors:
        offset = moved // tensor.itemsize + tensor.storage_offset()
        tensor.set_(target.untyped_storage(), offset, tensor.size(), tensor.stride())
