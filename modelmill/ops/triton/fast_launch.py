"""Launches with less Python than ``kernel[grid](...)`` takes: for kernels that a prompt's step
launches by the hundred.

Triton finds a compiled kernel by everything that it was given, options and all, in 20 to 40
microseconds, and asks the driver about each address. Here the caller says what decides the code;
the compiled kernel is kept under that, and launched by the function that Triton made for it, with
addresses as numbers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from modelmill.ops.carveout import set_carveout
from modelmill.ops.triton.device import INTERPRETED

POINTER_ALIGNMENT = 16  # bytes; what Triton compiles for where an address is a multiple of it
# Versions of Triton whose launcher takes what ``_direct_launch`` gives it; with others the compiled
# kernel launches itself.
SUPPORTED_TRITON = ("3.6.",)
LaunchFunction = Callable[
    [tuple[int, int, int], int, list[int], tuple[float, ...], tuple[Any, ...]], Any
]


class CachedLauncher:
    """Of one ``triton.jit`` function, whose constexprs come last."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled_launches: dict[Any, LaunchFunction] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        pointers: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        fixed: tuple[int, ...],
        constants: tuple[Any, ...],
        options: Mapping[str, Any],
        carveout: int | None = None,
    ) -> None:
        """Launch. numbers: in the order of the signature, after the pointers; fixed: those of them
        that Triton compiles for (whole numbers without ``do_not_specialize``). constants: every
        constexpr. carveout: per cent of a multiprocessor's memory that it asks to be shared
        (``ops.carveout``); it follows from the constants."""
        if INTERPRETED:
            self.kernel[grid](*pointers, *numbers, *constants, **options)
            return
        device = torch.cuda.current_device()
        addresses = [t.data_ptr() for t in pointers]
        aligned: Any = functools.reduce(operator.or_, addresses, 0) % POINTER_ALIGNMENT == 0
        if not aligned:
            aligned = tuple([address % POINTER_ALIGNMENT == 0 for address in addresses])
        key = (
            device,
            tuple([t.dtype for t in pointers]),
            aligned,
            fixed,
            constants,
            tuple(options.values()),
        )
        launch = self.compiled_launches.get(key)
        if launch is not None:
            launch(grid, device, addresses, numbers, constants)
            return
        self._check(len(pointers), numbers, fixed)
        compiled = self.kernel[grid](*pointers, *numbers, *constants, **options)
        if compiled is not None:  # else it was compiled in the background, and is asked for again
            if carveout is not None:
                set_carveout(compiled.function, carveout)
            self.compiled_launches[key] = _direct_launch(compiled) or _triton_launch(compiled)

    def _check(self, pointers: int, numbers: tuple[float, ...], fixed: tuple[int, ...]) -> None:
        """A number that Triton compiles for and that is not among ``fixed`` would bring another
        number's kernel.
        """
        told = getattr(self.kernel, "params", ())[pointers : pointers + len(numbers)]
        for param, number in zip(told, numbers, strict=False):
            if isinstance(number, int) and not param.do_not_specialize and number not in fixed:
                raise AssertionError(
                    f"Triton compiles for {param.name} = {number}: it belongs to ``fixed``"
                )


def _direct_launch(compiled: Any) -> LaunchFunction | None:
    """The launcher that Triton compiled for this kernel's arguments; None where it needs more than
    we give it.

    Left out: memory of its own for the kernel, hooks of profilers.
    """
    run: Any = getattr(compiled, "run", None)
    if not triton.__version__.startswith(SUPPORTED_TRITON) or not hasattr(run, "launch_pdl"):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, function, sizes = run.launch, compiled.function, compiled.packed_metadata
    together, early = run.launch_cooperative_grid, run.launch_pdl
    stream_of = torch._C._cuda_getCurrentRawStream

    def direct(
        grid: tuple[int, int, int],
        device: int,
        addresses: list[int],
        numbers: tuple[Any, ...],
        rest: tuple[Any, ...],
    ) -> None:
        launch(
            *grid, stream_of(device), function, together, early, None, None, sizes, None, None,
            None,
            *addresses, *numbers, *rest,
        )  # fmt: skip

    return direct


def _triton_launch(compiled: Any) -> LaunchFunction:
    """As ``compiled[grid]`` launches."""

    def launch(
        grid: tuple[int, int, int],
        device: int,
        addresses: list[int],
        numbers: tuple[Any, ...],
        rest: tuple[Any, ...],
    ) -> None:
        compiled[grid](*addresses, *numbers, *rest)

    return launch
