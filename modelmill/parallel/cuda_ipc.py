"""CUDA IPC: maps the memory of one GPU into the processes of other GPUs.

Calls the functions of the CUDA runtime that torch does not expose, in the library that torch has
loaded.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _IpcMemHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def allocate_zeroed(size: int) -> int:
    """Allocate ``size`` zeroed bytes on the current device; returns the address.

    A separate cudaMalloc, since IPC shares whole allocations. Raises RuntimeError.
    """
    address = ctypes.c_void_p()
    _call_cudart("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
    _call_cudart("cudaMemset", address, 0, ctypes.c_size_t(size))
    _call_cudart("cudaDeviceSynchronize")
    assert address.value is not None
    return address.value


def export_handle(address: int) -> bytes:
    """The IPC handle with which another process maps an allocation.

    Raises RuntimeError if the system does not support IPC memory.
    """
    handle = _IpcMemHandle()
    _call_cudart("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
    return bytes(handle)


def map_handle(handle: bytes) -> int:
    """Map another process's allocation; returns its address here.

    Raises RuntimeError if this GPU has no peer access to the other one.
    """
    address = ctypes.c_void_p()
    ipc = _IpcMemHandle.from_buffer_copy(handle)
    _call_cudart(
        "cudaIpcOpenMemHandle", ctypes.byref(address), ipc, ctypes.c_uint(_LAZY_PEER_ACCESS)
    )
    assert address.value is not None
    return address.value


def unmap_and_free(own_address: int, mapped_addresses: list[int]) -> None:
    """Unmap the others' allocations and free this process's own."""
    library = _load_cudart()
    for address in mapped_addresses:
        library.cudaIpcCloseMemHandle(ctypes.c_void_p(address))
    library.cudaFree(ctypes.c_void_p(own_address))
    library.cudaGetLastError()


def _call_cudart(name: str, *arguments: Any) -> None:
    library = _load_cudart()
    code = getattr(library, name)(*arguments)
    if code:
        # clear the error, so that the next call of torch does not report it
        library.cudaGetLastError()
        library.cudaGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"{name}: {library.cudaGetErrorString(code).decode()}")


@functools.cache
def _load_cudart() -> ctypes.CDLL:
    major = (torch.version.cuda or "0").split(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}")
    except OSError as error:
        raise RuntimeError(f"libcudart.so.{major}: {error}") from None
