"""Regions of sleepable memory, on the host and with a driver that maps host memory.

The fake driver keeps the rules of CUDA's virtual memory: what is mapped twice, read without memory
or not aligned is an error. Its addresses are those of a buffer, so that the bytes are real.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from modelmill.core.errors import CapacityError, MissingDependency
from modelmill.core.memory_limits import MemoryInfo
from modelmill.loader import pinned_blocks, sleepable_memory
from modelmill.loader.cuda_vmm import CudaDriver
from modelmill.loader.reachable_tensors import reachable_tensors
from modelmill.loader.sleepable_memory import CpuRegion, CudaRegion, MemoryRegion, SleepableMemory
from tests.wait import wait_until

UNIT = 4096
CHUNK, WAKE_CHUNK = 2 * UNIT, 4 * UNIT
BLOCK = 3 * UNIT
"""No multiple of either: a copy goes to two blocks, or from two mappings."""
CONTEXT = 0x1234
GARBAGE = 0xA5
"""What memory holds that was just mapped."""


class FakeLibrary:
    """libcuda's functions for virtual memory, on buffers of this process."""

    def __init__(self, free_bytes: int = 1 << 30) -> None:
        self.free_bytes = free_bytes
        self.reserved: dict[int, Any] = {}
        self.sizes: dict[int, int] = {}  # of the handles that cuMemCreate made
        self.mapped: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.calls: list[str] = []
        self.max_pinned = 1 << 30
        self.pin_error = 2  # out of memory
        self.after_unpinning: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(type(self), f"do_{name}")

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return int(function(self, *arguments) or 0)

        return call

    def do_cuMemGetAllocationGranularity(self, out: Any, properties: Any, option: Any) -> None:
        assert (properties._obj.type, properties._obj.location.type) == (1, 1)
        assert properties._obj.location.id == 3
        assert ctypes.sizeof(properties._obj) == 32
        assert option.value == 0
        out._obj.value = UNIT

    def do_cuCtxGetCurrent(self, out: Any) -> None:
        out._obj.value = CONTEXT

    def do_cuCtxSetCurrent(self, context: Any) -> None:
        assert context.value == CONTEXT

    def do_cuMemAddressReserve(
        self, out: Any, size: Any, alignment: Any, hint: Any, flags: Any
    ) -> None:
        assert size.value % UNIT == 0
        assert not (alignment.value)
        assert not (hint.value)
        assert not (flags.value)
        buffer = (ctypes.c_ubyte * size.value)()
        out._obj.value = ctypes.addressof(buffer)
        self.reserved[ctypes.addressof(buffer)] = buffer

    def do_cuMemAddressFree(self, address: Any, size: Any) -> None:
        buffer = self.reserved.pop(address.value)
        assert len(buffer) == size.value
        assert not any(address.value <= each < address.value + size.value for each in self.mapped)

    def do_cuMemCreate(self, out: Any, size: Any, properties: Any, flags: Any) -> int:
        assert properties._obj.type == 1
        assert (size.value % UNIT, flags.value) == (0, 0)
        if size.value > self.free_bytes:
            return 2
        self.free_bytes -= size.value
        out._obj.value = len(self.sizes) + 1
        self.sizes[out._obj.value] = size.value
        return 0

    def do_cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> None:
        assert self.sizes[handle.value] == size.value
        assert not (offset.value)
        assert not (flags.value)
        assert address.value not in self.mapped
        self.mapped[address.value] = size.value
        ctypes.memset(address.value, GARBAGE, size.value)

    def do_cuMemRelease(self, handle: Any) -> None:
        assert handle.value in self.sizes

    def do_cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> None:
        assert self.mapped[address.value] == size.value
        assert (access._obj.location.id, access._obj.flags, count.value) == (3, 3, 1)

    def do_cuMemUnmap(self, address: Any, size: Any) -> None:
        assert self.calls[-2] in ("cuCtxSynchronize", "cuMemUnmap")
        assert self.mapped.pop(address.value) == size.value
        self.free_bytes += size.value
        ctypes.memset(address.value, 0, size.value)

    def do_cuMemHostRegister_v2(self, address: Any, size: Any, flags: Any) -> int:
        assert flags.value == 0
        assert address.value % mmap.PAGESIZE == 0
        if len(self.pinned) >= self.max_pinned:
            return self.pin_error
        self.pinned[address.value] = size.value
        return 0

    def do_cuMemHostUnregister(self, address: Any) -> None:
        del self.pinned[address.value]
        while self.after_unpinning:
            self.after_unpinning.pop()()

    def do_cuMemcpyDtoHAsync_v2(self, host: Any, address: Any, size: Any, stream: Any) -> None:
        assert stream.value is None
        end = address.value + size.value
        assert size.value == sum(
            max(min(each + length, end) - max(each, address.value), 0)
            for each, length in self.mapped.items()
        )
        assert self.pinned[host.value] == size.value
        ctypes.memmove(host.value, address.value, size.value)

    def do_cuMemcpyHtoDAsync_v2(self, address: Any, host: Any, size: Any, stream: Any) -> None:
        assert stream.value is None
        assert any(
            each <= address.value and address.value + size.value <= each + length
            for each, length in self.mapped.items()
        )
        assert any(
            each <= host.value and host.value + size.value <= each + length
            for each, length in self.pinned.items()
        )
        ctypes.memmove(address.value, host.value, size.value)

    def do_cuMemsetD8_v2(self, address: Any, value: Any, size: Any) -> None:
        ctypes.memset(address.value, value.value, size.value)

    def do_cuCtxSynchronize(self) -> None:
        """Nothing runs behind the caller's back here."""

    def do_cuGetErrorString(self, code: Any, out: Any) -> None:
        out._obj.value = b"error %d" % code.value


def as_host_tensor(interface: Any, device: str) -> torch.Tensor:
    """A tensor of the fake GPU's memory, which keeps the interface alive as torch does."""
    assert device == "cuda:3"
    described = interface.__cuda_array_interface__
    (nbytes,), (address, read_only) = described["shape"], described["data"]
    assert (described["typestr"], described["version"], read_only) == ("|u1", 3, False)
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    buffer.keeps = interface
    return torch.frombuffer(buffer, dtype=torch.uint8)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    monkeypatch.setattr(sleepable_memory, "MAP_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(sleepable_memory, "WAKE_CHUNK_BYTES", WAKE_CHUNK)
    monkeypatch.setattr(pinned_blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(pinned_blocks, "FIRST_RELEASE_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(pinned_blocks, "RELEASE_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(sleepable_memory, "as_device_tensor", as_host_tensor)
    return FakeLibrary()


def cuda_region(library: FakeLibrary, nbytes: int) -> CudaRegion:
    return CudaRegion(CudaDriver(3, library), nbytes, "cuda:3")


def check_region(region: MemoryRegion, nbytes: int) -> None:
    """Offload and restore, drop and reallocate, at one address."""
    assert region.bytes.shape == (nbytes,)
    region.extend_backing(nbytes)
    address = region.bytes.data_ptr()
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    region.bytes.copy_(values)
    for _ in range(2):
        assert region.offload() >= nbytes
        assert not region.bytes.any()
        region.restore()
        assert region.bytes.data_ptr() == address
        assert torch.equal(region.bytes, values)
        region.free_host_copy()
        assert torch.equal(region.bytes, values)
    region.drop()
    region.reallocate()
    assert not region.bytes.any()


@pytest.mark.parametrize("nbytes", [1, UNIT, CHUNK, 5 * UNIT + 7])
def test_a_region_of_a_gpu(library: FakeLibrary, nbytes: int) -> None:
    free = library.free_bytes
    region = cuda_region(library, nbytes)
    check_region(region, nbytes)
    region.drop()
    assert library.free_bytes == free
    assert not (library.mapped)
    wait_until(lambda: not library.pinned)  # freed on a thread of its own


@pytest.mark.parametrize("nbytes", [0, 1, 5 * UNIT + 7])
def test_a_region_of_the_host(nbytes: int) -> None:
    check_region(CpuRegion(nbytes), nbytes)


def test_memory_is_taken_part_by_part(library: FakeLibrary) -> None:
    """So that weights move without twice their memory."""
    region = cuda_region(library, 3 * CHUNK)
    assert sum(library.mapped.values()) == CHUNK
    region.extend_backing(CHUNK + 1)
    assert sum(library.mapped.values()) == 2 * CHUNK


def test_addresses_are_free_when_region_and_tensors_are_gone(library: FakeLibrary) -> None:
    region = cuda_region(library, CHUNK)
    view = region.bytes[5:9]
    del region
    gc.collect()
    assert len(library.reserved) == len(library.mapped) == 1
    del view
    gc.collect()
    assert not (library.reserved)
    assert not (library.mapped)


def test_a_region_that_ends_asleep_frees_its_copy(library: FakeLibrary) -> None:
    """An engine that is closed while it sleeps leaves no pinned memory behind."""
    region = cuda_region(library, 2 * CHUNK)
    region.extend_backing(2 * CHUNK)
    region.offload()
    assert library.pinned
    del region
    gc.collect()
    assert not library.pinned
    assert not library.reserved


def test_a_full_gpu_can_be_tried_again(library: FakeLibrary) -> None:
    region = cuda_region(library, 2 * CHUNK)
    region.extend_backing(2 * CHUNK)
    values = torch.arange(2 * CHUNK).to(torch.uint8)
    region.bytes.copy_(values)
    region.offload()
    free, library.free_bytes = library.free_bytes, CHUNK
    with pytest.raises(CapacityError, match=r"^the GPU is full \(cuMemCreate\)$"):
        region.restore()
    library.free_bytes = free - CHUNK
    region.restore()
    assert torch.equal(region.bytes, values)


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        (0, 2, "no memory left to pin"),
        (1, 2, "no memory left to pin"),
        (2, 2, "no memory left to pin"),
        (1, 304, r"lets no more memory be pinned \(.*: error 304\); raise the limit"),
    ],
)
def test_a_host_that_cannot_pin_changes_nothing(
    library: FakeLibrary, blocks: int, error: int, message: str
) -> None:
    region = cuda_region(library, 3 * BLOCK)
    region.extend_backing(3 * BLOCK)
    region.bytes.fill_(7)
    library.max_pinned, library.pin_error = blocks, error
    with pytest.raises(CapacityError, match=message):
        region.offload()
    assert bool((region.bytes == 7).all())
    assert not library.pinned
    library.max_pinned = 3
    region.offload()
    region.restore()
    assert bool((region.bytes == 7).all())


def test_a_region_may_be_collected_while_one_of_its_blocks_is_freed(library: FakeLibrary) -> None:
    """On the thread that frees the block; a plain lock would wait for itself."""
    region = cuda_region(library, 3 * BLOCK)
    region.extend_backing(3 * BLOCK)
    region.offload()
    blocks: Any = region._addresses
    library.after_unpinning.append(blocks._host.release)
    blocks._host.release()
    assert not library.pinned


def test_a_host_without_memory_is_left_alone(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are touched: without a look at what is free the system would end the process."""
    monkeypatch.setattr(pinned_blocks, "read_memory_info", lambda: MemoryInfo(1 << 30, BLOCK))
    region = cuda_region(library, 2 * BLOCK)
    region.extend_backing(2 * BLOCK)
    with pytest.raises(CapacityError, match=r"pin: 24.00 KiB are needed, 12.00 KiB are free$"):
        region.offload()
    assert "cuMemHostRegister_v2" not in library.calls


def test_an_engine_that_sleeps_again_uses_what_is_pinned(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_blocks, "FIRST_RELEASE_PAUSE_SECONDS", 60)
    region = cuda_region(library, 4 * BLOCK)
    region.extend_backing(4 * BLOCK)
    for value in (1, 2):
        region.bytes.fill_(value)
        region.offload()
        region.restore()
        region.free_host_copy()
        assert bool((region.bytes == value).all())
    assert library.calls.count("cuMemHostRegister_v2") == 4
    assert "cuMemHostUnregister" not in library.calls
    # of those of which some were freed, the rest
    blocks: Any = region._addresses
    blocks._host._release_last()
    region.offload()
    assert library.calls.count("cuMemHostRegister_v2") == 5
    region.restore()
    assert bool((region.bytes == 2).all())


def test_a_gpu_without_virtual_memory_is_one_line(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLibrary, "do_cuMemGetAllocationGranularity", lambda *_: 801)
    with pytest.raises(MissingDependency, match=r"virtual memory management: .*error 801$"):
        CudaDriver(3, library)


def test_tensors_move_and_stay_the_same_objects() -> None:
    """Views of one storage stay views of one; strides and dtypes stay."""
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    half = torch.ones(3, dtype=torch.bfloat16)
    bits = torch.arange(7, dtype=torch.uint8)
    module = torch.nn.Module()
    module.register_buffer("whole", base)
    held_by_module: Any = module
    held_by_module.parts = {"column": base[:, 2], "list": [half, (bits,)]}
    before = reachable_tensors([module])
    expected, strides = [each.clone() for each in before], [each.stride() for each in before]
    memory = SleepableMemory("cpu")
    assert memory.move_tensors_in([module]) == 3 * sleepable_memory.ALLOCATION_ALIGNMENT_BYTES
    moved = reachable_tensors([module])
    assert len({each.untyped_storage().data_ptr() for each in moved}) == 1
    assert [id(each) for each in moved] == [id(each) for each in before]
    assert [each.stride() for each in moved] == strides
    for one, other in zip(moved, expected, strict=True):
        assert torch.equal(one, other)
    base[1, 2] = -5
    assert held_by_module.parts["column"][1] == -5
    memory.sleep()
    assert not base.any()
    memory.wake_up()
    assert base[1, 2] == -5
    assert torch.equal(bits, torch.arange(7, dtype=torch.uint8))


def test_of_a_file_only_what_tensors_view_moves() -> None:
    """A rank views its part of a file: the other ranks' parts take no memory."""
    file = torch.arange(64 * sleepable_memory.ALLOCATION_ALIGNMENT_BYTES).to(torch.uint8)[:-100]
    module: Any = torch.nn.Module()
    module.parts = [
        file[40:140], file[100:200], file[600:].as_strided((3, 2), (4096, 1)), file[-7:]
    ]  # fmt: skip
    expected = [each.clone() for each in module.parts]
    memory = SleepableMemory("cpu")
    blocks = 1 + (2 * 4096 + 600 + 2) // sleepable_memory.ALLOCATION_ALIGNMENT_BYTES + 1
    assert memory.move_tensors_in([module]) == blocks * sleepable_memory.ALLOCATION_ALIGNMENT_BYTES
    for _ in range(2):
        for part, values in zip(module.parts, expected, strict=True):
            assert torch.equal(part, values)
            assert part.untyped_storage().data_ptr() != file.untyped_storage().data_ptr()
        memory.sleep()
        memory.wake_up()


def test_nothing_is_unpinned_before_an_engine_is_awake(library: FakeLibrary) -> None:
    """Unpinning keeps other calls of the driver waiting; the cache is mapped during the copy."""
    memory = SleepableMemory("cpu")
    memory._device, memory._driver = "cuda:3", CudaDriver(3, library)
    weights = cuda_region(library, 2 * CHUNK)
    weights.extend_backing(2 * CHUNK)
    memory._weights.append(weights)
    memory.allocate_cache_zeros((9, CHUNK), torch.uint8, "cuda:3")
    memory.sleep()
    library.calls.clear()
    memory.wake_up()
    calls = [each for each in library.calls if each not in ("cuMemRelease", "cuMemSetAccess")]
    wake = calls[: calls.index("cuCtxSynchronize") + 1]
    assert "cuMemHostUnregister" not in wake
    assert wake == [
        "cuCtxSetCurrent", "cuMemCreate", "cuMemMap", "cuMemcpyHtoDAsync_v2",
        "cuMemcpyHtoDAsync_v2", "cuMemCreate", "cuMemMap", "cuMemsetD8_v2", "cuCtxSynchronize",
    ]  # fmt: skip


@pytest.mark.parametrize("free_chunks", [0, 1, 2, 3])
def test_a_wake_up_that_fails_takes_nothing(library: FakeLibrary, free_chunks: int) -> None:
    """Who sleeps has no memory of the GPU, and can wake up later."""
    memory = SleepableMemory("cpu")
    memory._device, memory._driver = "cuda:3", CudaDriver(3, library)
    weights = cuda_region(library, 2 * CHUNK)
    weights.extend_backing(2 * CHUNK)
    values = torch.arange(2 * CHUNK).to(torch.uint8)
    weights.bytes.copy_(values)
    memory._weights.append(weights)
    cache = memory.allocate_cache_zeros((2, CHUNK), torch.uint8, "cuda:3")
    free = library.free_bytes
    memory.sleep()
    library.free_bytes = free_chunks * CHUNK
    for _ in range(2):
        with pytest.raises(CapacityError, match="the GPU is full"):
            memory.wake_up()
        assert memory.is_asleep
        assert (library.mapped, library.free_bytes) == ({}, free_chunks * CHUNK)
    library.free_bytes = free + 4 * CHUNK
    memory.wake_up()
    assert torch.equal(weights.bytes, values)
    assert not cache.any()
    wait_until(lambda: not library.pinned)
    assert library.free_bytes == free
