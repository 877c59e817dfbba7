"""Cached launcher: launches a compiled Triton kernel without Triton's Python dispatch.

It is used for kernels that a prefill step launches hundreds of times. ``kernel[grid](...)`` takes
20 to 40 microseconds: Triton builds a key of all arguments and options, and queries the driver
about each pointer. Here the caller passes what the compiled code depends on. The compiled kernel is
cached under that key and launched through the launcher that Triton generated for it, with addresses
as integers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton

from modelmill.ops.carveout import set_smem_carveout
from modelmill.ops.triton.common.device import INTERPRETED

POINTER_ALIGNMENT = 16  # bytes; Triton specializes a kernel on pointers that are multiples of it
# Versions of Triton whose launcher has the signature that ``_make_direct_launch`` uses; with others
# the kernel is launched by ``compiled[grid]``.
SUPPORTED_TRITON = ("3.6.",)
LaunchFunction = Callable[
    [tuple[int, int, int], int, list[int], tuple[float, ...], tuple[Any, ...]], Any
]


class CachedLauncher:
    """Cached launches of one ``triton.jit`` function whose constexprs come last."""

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
        """Launch the kernel.

        Args:
            grid: programs.
            pointers: the kernel's tensors, first in its signature.
            numbers: its numbers, in the order of the signature, after the pointers.
            fixed: those of ``numbers`` that Triton specializes on (integers without
                ``do_not_specialize``).
            constants: all constexprs.
            options: num_warps, num_stages, launch_pdl, ….
            carveout: preferred shared-memory carveout in per cent (``ops.carveout``); it must be a
                function of the constants.
        """
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
        self._check_specialized_args_are_fixed(len(pointers), numbers, fixed)
        compiled = self.kernel[grid](*pointers, *numbers, *constants, **options)
        if (
            compiled is not None
        ):  # None while it is compiled in the background; the next call tries again
            if carveout is not None:
                set_smem_carveout(compiled.function, carveout)
            self.compiled_launches[key] = _make_direct_launch(compiled) or _make_triton_launch(
                compiled
            )

    def _check_specialized_args_are_fixed(
        self, pointers: int, numbers: tuple[float, ...], fixed: tuple[int, ...]
    ) -> None:
        """Check that ``fixed`` contains every number that Triton specializes on.

        Otherwise a launch could use a kernel that was compiled for another number.
        """
        params = getattr(self.kernel, "params", ())[pointers : pointers + len(numbers)]
        for param, number in zip(params, numbers, strict=False):
            if isinstance(number, int) and not param.do_not_specialize and number not in fixed:
                raise AssertionError(
                    f"Triton compiles for {param.name} = {number}: add it to ``fixed``"
                )


def _make_direct_launch(compiled: Any) -> LaunchFunction | None:
    """The launcher that Triton compiled for this kernel's arguments.

    Returns:
        None for an unsupported Triton version, and for kernels that need scratch memory. Profiler
        hooks are not called.
    """
    run: Any = getattr(compiled, "run", None)
    if not triton.__version__.startswith(SUPPORTED_TRITON) or not hasattr(run, "launch_pdl"):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, function, metadata = run.launch, compiled.function, compiled.packed_metadata
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl
    current_stream = torch._C._cuda_getCurrentRawStream

    def direct(
        grid: tuple[int, int, int],
        device: int,
        addresses: list[int],
        numbers: tuple[Any, ...],
        rest: tuple[Any, ...],
    ) -> None:
        launch(
            *grid, current_stream(device), function, cooperative, pdl, None, None, metadata,
            None, None, None,
            *addresses, *numbers, *rest,
        )  # fmt: skip

    return direct


def _make_triton_launch(compiled: Any) -> LaunchFunction:
    """Launch through Triton's own ``compiled[grid]``, without the cached arguments."""
    return lambda grid, _device, addresses, numbers, rest: compiled[grid](
        *addresses, *numbers, *rest
    )
