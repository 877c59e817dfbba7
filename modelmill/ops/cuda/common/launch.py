"""Loads compiled kernels and launches them on torch's current stream, through the driver (libcuda).

Arguments travel as packed bytes in the layout of the kernel's parameters; the driver copies them at
the call, so a launch may be captured in a CUDA graph. Functions run with the tensors' device
current.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from modelmill.ops.carveout import load_cuda_driver, set_smem_carveout
from modelmill.ops.cuda.common import build

# Of the driver: CUtensorMapDataType, CU_TENSOR_MAP_SWIZZLE_128B,
# CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_TENSOR_MAP_DTYPES = {
    torch.uint8: 0,
    torch.int8: 0,
    torch.int32: 3,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
_TENSOR_MAP_SWIZZLE_128B, _L2_PROMOTION_256B, _MAX_DYNAMIC_SMEM_ATTRIBUTE = 3, 3, 8
# CUlaunchConfig: sizes of grid and block, shared bytes, stream, attributes, how many;
# CUlaunchAttribute with CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: its id and the first
# word of 64 bytes.
_LAUNCH_CONFIG_STRUCT, _LAUNCH_ATTRIBUTE_STRUCT, _PDL_ATTRIBUTE_ID = "=7I4xQQI4x", "=i4xi60x", 6
_TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT = 128, 64
# to arguments; making such a type takes microseconds
_POINTER_ARRAY_TYPES = [ctypes.c_char_p * count for count in range(9)]
# Read by the driver at each launch, never written.
_PDL_ATTRIBUTE = ctypes.create_string_buffer(
    struct.pack(_LAUNCH_ATTRIBUTE_STRUCT, _PDL_ATTRIBUTE_ID, 1)
)
_MAX_TENSOR_MAPS = 1024  # kept; each is a few hundred bytes, and making one takes microseconds


@dataclass(frozen=True)
class CudaKernel:
    """A loaded function: ``threads`` a block, ``shared`` bytes of dynamic shared memory."""

    function: int
    threads: int
    shared: int

    def launch(self, blocks: int, *arguments: bytes, pdl: bool = False) -> None:
        """Run ``blocks`` blocks; each argument is one parameter of the kernel, packed.

        pdl: it may be placed before the kernel in front has ended, and waits for it by itself
        (griddepcontrol).
        """
        pointers = _POINTER_ARRAY_TYPES[len(arguments)](*arguments)
        # as torch.cuda.current_stream() knows it, without making a Stream of it
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        attributes = (ctypes.addressof(_PDL_ATTRIBUTE), 1) if pdl else (0, 0)
        how = struct.pack(
            _LAUNCH_CONFIG_STRUCT,
            blocks,
            1,
            1,
            self.threads,
            1,
            1,
            self.shared,
            stream,
            *attributes,
        )
        code = load_cuda_driver().cuLaunchKernelEx(how, self._function_handle, pointers, None)
        if code:
            _raise_on_error_code(code)

    @functools.cached_property
    def _function_handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.function)


@functools.cache
def compile_and_load_kernel(
    source: str,
    name: str,
    macros: tuple[str, ...],
    threads: int,
    shared: int,
    device: int,
    carveout: int | None = None,
) -> CudaKernel:
    """Load the kernel ``name`` of ``<source>.cu`` for the current device ``device``.

    Compiled first unless it is cached.

    carveout: per cent of an SM's memory requested as shared memory (``ops.carveout``).

    Raises MissingDependency where it cannot be compiled.
    """
    loaded = load_cubin(build.compile_cubin(source, macros), name, threads, shared)
    if carveout is not None:
        set_smem_carveout(loaded.function, carveout)
    return loaded


def load_cubin(path: Path, name: str, threads: int, shared: int) -> CudaKernel:
    """A kernel of a cubin, which stays loaded for as long as the process lives."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _raise_on_error_code(
        load_cuda_driver().cuModuleLoadData(ctypes.byref(module), path.read_bytes())
    )
    _raise_on_error_code(
        load_cuda_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    )
    _raise_on_error_code(
        load_cuda_driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SMEM_ATTRIBUTE, shared)
    )
    assert function.value is not None
    return CudaKernel(function.value, threads, shared)


@functools.lru_cache(_MAX_TENSOR_MAPS)
def tensor_map(
    address: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool = True,
) -> bytes:
    """Encode a CUtensorMap for TMA, with or without the 128-byte swizzle.

    sizes and box run from the innermost dimension outwards, in elements; strides, in bytes, leave
    out the innermost, whose elements lie side by side. address and strides are multiples of 16
    bytes; a swizzled box is at most 128 bytes wide, any at most 256 elements.
    """
    rank = len(sizes)
    space = ctypes.create_string_buffer(_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
    place = -(-ctypes.addressof(space) // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
    _raise_on_error_code(
        load_cuda_driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(place),
            _TENSOR_MAP_DTYPES[dtype],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            _TENSOR_MAP_SWIZZLE_128B if swizzled else 0,
            _L2_PROMOTION_256B,
            0,
        )
    )
    return ctypes.string_at(place, _TENSOR_MAP_BYTES)


def data_pointers(*tensors: torch.Tensor | None) -> list[int]:
    """Device addresses of tensors; 0 for None."""
    return [0 if t is None else t.data_ptr() for t in tensors]


@functools.cache
def sm_count(device: int) -> int:
    """Streaming SMs of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _raise_on_error_code(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        load_cuda_driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"the CUDA driver refuses: {(text.value or b'?').decode()} ({code})")
