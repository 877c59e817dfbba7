"""CUDA virtual memory: addresses that are reserved once and backed by memory while it is needed.

Calls the driver's functions that torch does not expose (``cuMemAddressReserve``, ``cuMemMap``, …).
A mapping may be taken away and another one put at the same addresses, so that pointers in captured
CUDA graphs and in bound kernels stay valid.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from modelmill.core.errors import CapacityError, MissingDependency

_MEM_ALLOCATION_TYPE_PINNED = (
    1  # CU_MEM_ALLOCATION_TYPE_PINNED: memory of a device, not of the host
)
_MEM_LOCATION_TYPE_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_MEM_ACCESS_READWRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_CUDA_ERROR_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """The functions of the driver that virtual memory needs, for one device.

    It is made on a thread where the device's context is current, as after any call of torch;
    another thread calls ``make_current`` before the other methods.
    """

    def __init__(self, device_index: int, library: Any = None) -> None:
        """Ask for the granularity of mappings.

        Args:
            device_index: among the visible GPUs.
            library: with the driver's functions; None: libcuda.

        Raises:
            MissingDependency: the GPU has no virtual memory management.
        """
        self._library = _libcuda() if library is None else library
        location = _Location(_MEM_LOCATION_TYPE_DEVICE, device_index)
        self._properties = _AllocationProperties(
            type=_MEM_ALLOCATION_TYPE_PINNED, location=location
        )
        self._access = _AccessDescription(location, _MEM_ACCESS_READWRITE)
        self._context = ctypes.c_void_p()
        self._call_driver("cuCtxGetCurrent", ctypes.byref(self._context))
        granularity = ctypes.c_size_t()
        try:
            self._call_driver(
                "cuMemGetAllocationGranularity",
                ctypes.byref(granularity),
                ctypes.byref(self._properties),
                ctypes.c_int(0),
            )
        except RuntimeError as error:
            raise MissingDependency(
                f"sleep mode needs a GPU with virtual memory management: {error}"
            ) from None
        self.granularity = granularity.value

    def make_current(self) -> None:
        """Use the device's context on this thread."""
        self._call_driver("cuCtxSetCurrent", self._context)

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses without memory; returns the first."""
        address = ctypes.c_uint64()
        size, zero = ctypes.c_size_t(nbytes), ctypes.c_uint64(0)
        self._call_driver(
            "cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero
        )
        return address.value

    def free_addresses(self, address: int, nbytes: int) -> None:
        """Give reserved addresses back."""
        self._call_driver("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def map(self, address: int, nbytes: int) -> None:
        """Back reserved addresses with memory, whose content is not defined.

        Raises:
            CapacityError: the GPU has not so much left.
        """
        handle, size, zero = ctypes.c_uint64(), ctypes.c_size_t(nbytes), ctypes.c_uint64(0)
        where = ctypes.c_uint64(address)
        self._call_driver(
            "cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), zero
        )
        try:
            self._call_driver("cuMemMap", where, size, ctypes.c_size_t(0), handle, zero)
        finally:
            # the mapping keeps the memory until it is taken away
            self._call_driver("cuMemRelease", handle)
        self._call_driver(
            "cuMemSetAccess", where, size, ctypes.byref(self._access), ctypes.c_size_t(1)
        )

    def unmap(self, address: int, nbytes: int) -> None:
        """Take the memory of addresses away, which stay reserved."""
        self._call_driver("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def pin(self, address: int, nbytes: int) -> None:
        """Pin memory of the host, which the GPU then copies from and to by itself.

        Raises:
            CapacityError: the host has not so much left, or does not let it be pinned.
        """
        size = ctypes.c_size_t(nbytes)
        where = ctypes.c_void_p(address)
        try:
            self._call_driver("cuMemHostRegister_v2", where, size, ctypes.c_uint(0))
        except RuntimeError as error:
            raise CapacityError(
                f"the host lets no more memory be pinned ({error}); raise the limit (ulimit -l)"
            ) from None

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        self._call_driver("cuMemHostUnregister", ctypes.c_void_p(address))

    def copy_to_host_async(self, host: int, address: int, nbytes: int) -> None:
        """Start a copy from the GPU to pinned memory."""
        size, stream = ctypes.c_size_t(nbytes), ctypes.c_void_p()
        where = ctypes.c_uint64(address)
        self._call_driver("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), where, size, stream)

    def copy_to_device_async(self, address: int, host: int, nbytes: int) -> None:
        """Start a copy from pinned memory to the GPU."""
        size, stream = ctypes.c_size_t(nbytes), ctypes.c_void_p()
        where = ctypes.c_uint64(address)
        self._call_driver("cuMemcpyHtoDAsync_v2", where, ctypes.c_void_p(host), size, stream)

    def set_zero(self, address: int, nbytes: int) -> None:
        """Write zeros."""
        size = ctypes.c_size_t(nbytes)
        self._call_driver("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(0), size)

    def synchronize(self) -> None:
        """Wait for all that was started on the device."""
        self._call_driver("cuCtxSynchronize")

    def _call_driver(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == _CUDA_ERROR_OUT_OF_MEMORY:
            where = "the host has no memory left to pin" if "Host" in name else "the GPU is full"
            raise CapacityError(f"{where} ({name})")
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise RuntimeError(f"{name}: {reason}")


@functools.cache
def _libcuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MissingDependency(f"sleep mode needs NVIDIA's driver: {error}") from None
