"""NVIDIA GPU generations, and a fake GPU of one: what the package chooses there, without a GPU.

The numbers are those of the CUDA C++ Programming Guide's table of technical specifications per
compute capability: "maximum amount of shared memory per thread block".
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch

import modelmill.ops.cuda
import modelmill.ops.triton
from modelmill.ops.cuda.common import build
from modelmill.ops.triton.common import device


class GpuGeneration(NamedTuple):
    """GPUs of one compute capability.

    Attributes:
        capability: compute capability.
        name: of the architecture.
        examples: GPUs.
        shared_kib: largest shared memory of a block.
        sms: of the first example; choices depend on them.
    """

    capability: tuple[int, int]
    name: str
    examples: str
    shared_kib: int
    sms: int

    @property
    def arch(self) -> str:
        """Name of the architecture as ptxas knows it."""
        return "sm_{}{}".format(*self.capability)

    @property
    def shared_bytes(self) -> int:
        """Largest shared memory of a block in bytes."""
        return self.shared_kib << 10


GENERATIONS = (
    GpuGeneration((8, 0), "Ampere", "A100, A30", 163, 108),
    GpuGeneration((8, 6), "Ampere", "A10, A40, RTX 30", 99, 72),
    GpuGeneration((8, 9), "Ada", "L4, L40S, RTX 40", 99, 58),
    GpuGeneration((9, 0), "Hopper", "H100, H200", 227, 132),
    GpuGeneration((10, 0), "Blackwell", "B200", 227, 148),
    GpuGeneration((12, 0), "Blackwell", "RTX 50, RTX PRO 6000", 99, 170),
)


@contextmanager
def fake_gpu(generation: GpuGeneration, hip: str | None = None) -> Iterator[None]:
    """Make torch and the package's GPU kernels take CPU and meta tensors for this GPU's.

    Kernels in CUDA C++ count as compilable; nothing may be launched.

    hip: the version of ROCm that torch claims to be built for.
    """
    answers: Mapping[str, Any] = {
        "torch.version.hip": hip,
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "torch.cuda.get_device_capability": lambda *_: generation.capability,
        "torch.Tensor.is_cuda": property(lambda _: True),
        "torch.Tensor.get_device": lambda _: 0,
        "modelmill.ops.cuda.common.build.find_compiler": lambda: build.Compiler("any"),
        "modelmill.ops.cuda.common.build.compile_cubin": lambda *_: None,
        "modelmill.ops.triton.common.device.INTERPRETED": False,
    }
    # the tensors' own device is none of torch.cuda's; modules bind these functions by their names
    gpu = torch.device("cuda", 0)
    per_device: Mapping[Callable[..., Any], Callable[..., Any]] = {
        device.sm_count: lambda *_: generation.sms,
        device.max_shared_bytes: lambda *_: generation.shared_bytes,
        device.supports_pdl: lambda *_: device_function(device.supports_pdl, gpu),
        device.has_wgmma: lambda *_: device_function(device.has_wgmma, gpu),
        device.supports_fp8: lambda *_: device_function(device.supports_fp8, gpu),
    }
    patches = [mock.patch(name, answer) for name, answer in answers.items()]
    patches += [
        mock.patch.object(module, name, per_device[value])
        for module in kernel_modules()
        if module is not device
        for name, value in vars(module).items()
        if callable(value) and value.__hash__ is not None and value in per_device
    ]
    forget_launches()
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
        forget_launches()


def forget_launches() -> None:
    """Empty the caches of Triton's launch code: they hold choices for the GPU that was there."""
    for module in kernel_modules():
        if module.__name__.startswith(modelmill.ops.triton.__name__):
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def device_function(cached: Any, gpu: torch.device) -> Any:
    """Call a function of a device without its cache, which holds answers of other GPUs."""
    return cached.__wrapped__(gpu)


@functools.cache
def kernel_modules() -> tuple[ModuleType, ...]:
    """All modules of the GPU backends."""
    return tuple(
        importlib.import_module(info.name)
        for backend in (modelmill.ops.triton, modelmill.ops.cuda)
        for info in pkgutil.walk_packages(backend.__path__, f"{backend.__name__}.")
    )
