"""A fake Hopper GPU that launches nothing, to measure the host's part of kernel launches.

Tensors live on the CPU, and the driver (fake_cuda_driver.c) takes every launch and forgets it.
Triton compiles for sm_90 and launches through its own launchers. Linux with gcc; a torch without
CUDA.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FAKE_STREAM = 0x77
NUM_SMS = 132


def driver_environment(folder: Path) -> dict[str, str]:
    """Set up this process to load the fake driver, compiled into ``folder``.

    Raises:
        FileNotFoundError: without gcc.
    """
    gcc = shutil.which("gcc")
    if gcc is None or sys.platform != "linux":
        raise FileNotFoundError("the silent driver needs gcc on Linux")
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(
        [gcc, *flags, "-o", str(folder / "libcuda.so.1"), str(HERE / "fake_cuda_driver.c")],
        check=True,
    )
    paths = {
        "LD_LIBRARY_PATH": folder,
        "TRITON_LIBCUDA_PATH": folder,
        "TRITON_CACHE_DIR": folder / "triton",
    }
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return inherited | {key: str(path) for key, path in paths.items()}


def rerun_with_driver(folder: Path, arguments: Sequence[str]) -> int:
    """Run this program in a process that finds the silent driver; its exit status."""
    return subprocess.run(
        [sys.executable, *arguments], env=driver_environment(folder), check=False
    ).returncode


def fake_hopper_device() -> None:
    """From now on torch and modelmill believe that tensors are on a Hopper GPU."""
    import torch

    answers: Mapping[str, object] = {
        "current_device": lambda: 0,
        "set_device": _nothing,
        "is_available": lambda: True,
        "get_device_capability": lambda *_: (9, 0),
        "device": _FakeDevice,
        "is_current_stream_capturing": lambda: False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch._C._cuda_getCurrentRawStream = lambda *_: FAKE_STREAM
    torch.Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment]
    torch.Tensor.get_device = lambda _: 0  # type: ignore[assignment, method-assign]


def disable_kernels() -> None:
    """Kernels of ours are neither compiled nor loaded, and every variant says that it can run."""
    import torch

    import modelmill.ops.cuda as cuda_backend
    import modelmill.ops.triton as triton_backend
    from modelmill.ops.cuda.attention import paged_attention
    from modelmill.ops.cuda.common import build, launch

    @functools.cache
    def kernel(*args: Any) -> launch.CudaKernel:
        _, _, _, threads, shared, *_ = args
        return launch.CudaKernel(1, threads, shared)

    build.kernel_compile_failure_reason = _nothing
    launch.sm_count = lambda *_: NUM_SMS  # type: ignore[assignment]
    launch.compile_and_load_kernel = kernel
    counters = torch.zeros(2, dtype=torch.int32)
    paged_attention._stream_counters = lambda *_: counters  # type: ignore[assignment]
    everywhere: Mapping[str, object] = {
        "unavailable_reason": _nothing,
        "sm_count": lambda *_: NUM_SMS,
        "supports_pdl": lambda *_: True,
        "set_smem_carveout": _nothing,
    }
    replaced = set()
    for backend in (triton_backend, cuda_backend):
        for module_info in pkgutil.walk_packages(backend.__path__, f"{backend.__name__}."):
            module = importlib.import_module(module_info.name)
            for name, answer in everywhere.items():
                if hasattr(module, name):
                    setattr(module, name, answer)
                    replaced.add(name)
    if missing := everywhere.keys() - replaced:
        raise RuntimeError(f"no kernel module has {sorted(missing)}: were they renamed?")


def _nothing(*_: object, **__: object) -> None: ...


class _FakeDevice:
    """``torch.cuda.device`` where there is one device."""

    def __init__(self, device: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
