"""Limits how long the threads of torch's OpenMP spin, where torch was imported first.

The runtime reads its environment when it is loaded. By default GNU's threads spin 300,000 times at
a barrier (up to 20 ms), and where another process has one of the cores, they spin on the one that
the last of them needs: a prompt of 128 tokens took 3.9 s in place of 0.1. While there are more
threads than processors GNU's runtime lets them spin a hundred times only (its manual,
GOMP_SPINCOUNT). So we give it some threads that sleep for ever.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import torch

from modelmill.core import env

_lock = threading.Lock()
# whose team makes the threads more than the processors
_oversubscribing_threads: list[threading.Thread] = []


def limit_spin_wait() -> None:
    """Limit the spinning of GNU OpenMP's threads to microseconds, for the life of the process.

    Does nothing if the environment sets a wait policy.

    To be called once torch knows how many threads it may use.
    """
    if env.openmp_wait_vars_in_env() or torch.get_num_threads() == 1:
        return
    with _lock:
        if not _oversubscribing_threads:
            _start_idle_openmp_team()


def describe_wait_policy() -> str:
    """How they wait, in one line."""
    named = env.openmp_wait_vars_in_env()
    if named:
        return ", ".join(f"{name}={value}" for name, value in named.items())
    return (
        "spin for microseconds (torch was imported first)"
        if _oversubscribing_threads
        else "as the OpenMP runtime likes"
    )


def _start_idle_openmp_team() -> None:
    library = next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"), None)
    try:
        openmp = ctypes.CDLL(str(library))
        parallel, processors = openmp.GOMP_parallel, openmp.omp_get_num_procs
        if hasattr(openmp, "kmp_set_blocktime"):
            return  # LLVM's or Intel's, which offer GNU's entry points, too
        nothing = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p)
    except (OSError, AttributeError):
        return
    members = max(2, processors() - torch.get_num_threads() + 2)
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    there = threading.Event()

    def keep() -> None:
        parallel(nothing, None, members, 0)
        there.set()
        threading.Event().wait()  # a team lives as long as its first thread

    _oversubscribing_threads.append(
        threading.Thread(target=keep, name="modelmill-openmp", daemon=True)
    )
    _oversubscribing_threads[0].start()
    there.wait()
