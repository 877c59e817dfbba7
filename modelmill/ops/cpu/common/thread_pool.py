"""Restricts torch to one thread while our kernels use several."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from modelmill.ops.cpu.common import build


@contextlib.contextmanager
def single_thread_torch() -> Iterator[None]:
    """Run torch on the caller's thread only; our kernels keep torch's number of threads.

    For work of many small ops between some large products: OpenMP ends each of torch's with a
    barrier at which threads spin, and on a busy machine all of them wait for the one that has no
    core. Ours do not wait for workers that have not started.
    """
    count = torch.get_num_threads()
    if count == 1 or build.available("cpu") is not None:
        yield
        return
    limit = _set_num_threads()
    torch.set_num_threads(1)
    limit(count)
    try:
        yield
    finally:
        limit(0)
        torch.set_num_threads(count)


@functools.cache
def _set_num_threads() -> Callable[..., Any]:
    return build.function("modelmill_set_num_threads", "q")
