"""Calls of the C++ matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from modelmill.ops.cpu.common import build


class GemmFunction:
    """A C function that computes the product of some operands into a new output [T, N]."""

    def __init__(self, name: str, signature: str) -> None:
        """Neither builds nor loads the kernels: a call does.

        Args:
            name: of the C function.
            signature: as of ``build.load_function``: the output, the operands, the sizes, the
                code of the output's dtype, flags.
        """
        self.name, self.signature = name, signature

    def __call__(
        self,
        operands: Sequence[torch.Tensor | None],
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        *flags: int,
    ) -> torch.Tensor:
        """Compute the output.

        Args:
            operands: packed tensors; None is a null pointer.
            sizes: T, K, N and others that the function takes.
            dtype: of the output, one of ``build.DTYPE_CODES``.
            flags: the function's last arguments.
        """
        rows, n = sizes[0], sizes[2]
        out = torch.empty(rows, n, dtype=dtype)
        pointers = [None if t is None else t.data_ptr() for t in (out, *operands)]
        long = rows > build.SMALL_M_LIMIT
        function = load_gemm_function(self.name, self.signature, release_gil=long)
        function(*pointers, *sizes, build.DTYPE_CODES[dtype], *flags)
        return out


@functools.cache
def load_gemm_function(
    name: str, signature: str, *, release_gil: bool = False
) -> Callable[..., Any]:
    """``build.load_function``, once."""
    return build.load_function(name, signature, release_gil=release_gil)
