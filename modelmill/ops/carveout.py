"""Shared-memory carveout: how an SM divides its on-chip memory between shared memory and L1 cache.

The driver chooses the division per kernel from its shared-memory size. An SM changes it only while
idle. A kernel started early by PDL (``pdl``) while the previous kernel is still running inherits
the previous division, and keeps it as long as it occupies the SMs; fewer of its blocks than
intended then run at once. Therefore all kernels that follow each other in a layer request the same
carveout (docs/notes/one-carveout-for-kernels-that-follow.md).
"""

from __future__ import annotations

import ctypes
import functools

# Per cent of an SM's shared memory: 16 KB of 228 KB, for three or four blocks of a decode kernel
# (three reach the same memory bandwidth as four). With 32 KB for rope_cache alone it was as slow as
# without a preference.
DECODE_CARVEOUT_PERCENT = 7
_CARVEOUT_ATTRIBUTE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


def set_smem_carveout(function: int, percent: int) -> None:
    """Set the preferred shared-memory carveout of a loaded kernel.

    It is a hint: a driver that ignores it is not an error.

    Args:
        function: a CUfunction.
        percent: per cent of the SM's maximum shared memory.
    """
    load_cuda_driver().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT_ATTRIBUTE, percent)


@functools.cache
def load_cuda_driver() -> ctypes.CDLL:
    """Load the CUDA driver library, libcuda.so.1."""
    return ctypes.CDLL("libcuda.so.1")
