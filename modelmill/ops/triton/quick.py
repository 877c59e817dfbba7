"""Launches with less Python than ``kernel[grid](...)`` takes: for kernels that a prompt's step launches by the hundred.

Triton finds a compiled kernel by everything that it was given, options and all, in 20 to 40 microseconds. Here the
caller says what decides the code; the compiled kernel is kept under that, and launched as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from modelmill.ops.carveout import divide
from modelmill.ops.triton.device import INTERPRETED

ALIGNED = 16  # bytes; what Triton compiles for where an address is a multiple of it


class Quick:
    """Of one ``triton.jit`` function, whose constexprs come last."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.kept: dict[Any, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        pointers: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        fixed: tuple[int, ...],
        constants: tuple[Any, ...],
        options: Mapping[str, Any],
        division: int | None = None,
    ) -> None:
        """Launch. numbers: in the order of the signature, after the pointers; fixed: those of them that Triton compiles
        for (whole numbers without ``do_not_specialize``). constants: every constexpr. division: per cent of a
        multiprocessor's memory that it asks to be shared (``ops.carveout``); it follows from the constants."""
        if INTERPRETED:
            self.kernel[grid](*pointers, *numbers, *constants, **options)
            return
        kinds = tuple([(t.dtype, t.data_ptr() % ALIGNED == 0) for t in pointers])
        key = (torch.cuda.current_device(), kinds, fixed, constants, tuple(options.values()))
        compiled = self.kept.get(key)
        if compiled is None:
            self._check(len(pointers), numbers, fixed)
            compiled = self.kept[key] = self.kernel[grid](*pointers, *numbers, *constants, **options)
            if compiled is not None and division is not None:
                divide(compiled.function, division)
        else:
            compiled[grid](*pointers, *numbers, *constants)

    def _check(self, pointers: int, numbers: tuple[float, ...], fixed: tuple[int, ...]) -> None:
        """A number that Triton compiles for and that is not among ``fixed`` would bring another number's kernel."""
        told = getattr(self.kernel, "params", ())[pointers : pointers + len(numbers)]
        for param, number in zip(told, numbers, strict=False):
            if isinstance(number, int) and not param.do_not_specialize and number not in fixed:
                raise AssertionError(f"Triton compiles for {param.name} = {number}: it belongs to ``fixed``")
