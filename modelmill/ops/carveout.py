"""How a multiprocessor divides its memory between shared memory and the L1 cache, for kernels that
follow each other.

The driver chooses a division for each kernel by its shared memory, and a multiprocessor changes to
another only when nothing runs on it. A kernel that is placed while the one in front is still
running (``early``) finds that one's, and stays with it for as long as it keeps the multiprocessors
busy: fewer of its blocks than were meant run at once. Kernels that follow each other in every layer
therefore ask for one division (docs/performance.md has what that is worth).
"""

from __future__ import annotations

import ctypes
import functools

# Per cent of a multiprocessor's shared memory: 16 KB of 228, which three or four blocks of a decode
# kernel share (three keep the memory as busy as four). With 32 KB for rope_cache alone it was as
# slow as without asking.
DECODE_CARVEOUT_PERCENT = 7
_CARVEOUT_ATTRIBUTE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


def set_carveout(function: int, percent: int) -> None:
    """Have a loaded kernel (a CUfunction) ask for ``percent`` of a multiprocessor's memory that may
    be shared.

    It is a wish: a driver that does not follow it is not an error.
    """
    cuda_driver().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT_ATTRIBUTE, percent)


@functools.cache
def cuda_driver() -> ctypes.CDLL:
    """The CUDA driver."""
    return ctypes.CDLL("libcuda.so.1")
