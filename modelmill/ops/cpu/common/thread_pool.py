"""Restricts torch to one thread while our kernels use several."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from modelmill.ops.cpu.common import build

_load_set_num_threads = build.make_lazy_function_loader("modelmill_set_num_threads", "q")


@contextlib.contextmanager
def single_thread_torch() -> Iterator[None]:
    """Run torch on the caller's thread only; our kernels keep torch's number of threads.

    For work of many small ops between some large products: OpenMP ends each of torch's with a
    barrier at which threads spin, and on a busy machine all of them wait for the one that has no
    core. Ours do not wait for workers that have not started.

    Other threads keep their number, also one that first calls torch meanwhile: what
    ``torch.set_num_threads`` sets is what it would begin with, for good.
    """
    count = torch.get_num_threads()
    if count == 1 or build.unavailable_reason("cpu") is not None:
        yield
        return
    limit, limit_torch, limit_mkl = _load_set_num_threads(), *_thread_count_setters()
    limit_torch(1)
    mkl_before = limit_mkl(1)
    limit(count)
    try:
        yield
    finally:
        limit(0)
        limit_mkl(mkl_before)
        limit_torch(count)


@functools.cache
def _thread_count_setters() -> tuple[Callable[[int], Any], Callable[[int], int]]:
    """Functions that set OpenMP's and MKL's number of threads in the caller's thread only.

    That of MKL returns what was set; 0 is the process's. Where torch has no such functions, the
    first one is torch's own.
    """
    library = next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"), None)
    try:
        functions = ctypes.CDLL(str(library))
        set_openmp = functions.omp_set_num_threads
    except (OSError, AttributeError):
        return torch.set_num_threads, lambda _: 0
    set_openmp.argtypes, set_openmp.restype = [ctypes.c_int], None
    try:
        set_mkl = functions.MKL_Set_Num_Threads_Local
    except AttributeError:
        return set_openmp, lambda _: 0
    set_mkl.argtypes, set_mkl.restype = [ctypes.c_int], ctypes.c_int
    return set_openmp, set_mkl
