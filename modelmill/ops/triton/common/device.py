"""Where Triton kernels can run, and device properties that determine their launches."""

from __future__ import annotations

import functools

import torch
from triton.runtime import driver

from modelmill.core import env
from modelmill.ops.kernel_support import HALF_DTYPES, GemmSupportRange

# Read once: triton.jit decides at decoration whether a kernel is compiled or interpreted.
INTERPRETED = env.triton_interpret()
# Products that dequantize the weight inside the GEMM kernel: with more rows of float32 cuBLAS uses
# the float32 units better. No kernel accumulates in float64.
FUSED_DEQUANT_GEMM_RANGES = (
    GemmSupportRange(dtypes=HALF_DTYPES),
    GemmSupportRange(m=(1, 16), dtypes=(torch.float32,)),
)


def unavailable_reason(device_type: str) -> str | None:
    """None if kernels with PTX or PDL run on this device type ("cuda", "cpu"), else why not."""
    if device_type == "cuda" and is_amd():
        return "the kernels use NVIDIA's PTX or PDL: not offered on AMD GPUs (ROCm)"
    return unavailable_reason_for_portable_kernel(device_type)


def unavailable_reason_for_portable_kernel(device_type: str) -> str | None:
    """The same for kernels with neither PTX nor PDL, which AMD GPUs run, too."""
    if device_type == "cpu":
        return None if INTERPRETED else "Triton needs a GPU (its interpreter is for tests)"
    if device_type != "cuda":
        return f"Triton kernels are not written for {device_type}"
    if INTERPRETED:
        return "TRITON_INTERPRET=1 is set"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not is_amd() and torch.cuda.get_device_capability()[0] < 8:
        return "the kernels need compute capability 8.0 or newer"
    return None


def is_amd() -> bool:
    """Whether torch is built for ROCm, which calls AMD's GPUs "cuda" and numbers them alike."""
    return torch.version.hip is not None


@functools.lru_cache
def sm_count(device: torch.device) -> int:
    """SMs of a GPU; 2 on the CPU, so that tests also cover the split paths."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache
def total_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory; without a GPU those of a large one."""
    if device.type != "cuda":
        return 128 << 30
    return int(torch.cuda.get_device_properties(device).total_memory)


@functools.lru_cache
def max_shared_bytes(device: torch.device) -> int:
    """Maximum shared memory per program in bytes; Hopper's if there is no GPU."""
    if device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.lru_cache
def supports_pdl(device: torch.device) -> bool:
    """Whether the GPU supports programmatic dependent launch (Hopper and later)."""
    if device.type != "cuda" or is_amd():
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@functools.lru_cache
def has_wgmma(device: torch.device) -> bool:
    """Whether Triton multiplies with Hopper's warpgroup instructions (compute capability 9)."""
    if device.type != "cuda" or is_amd():
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


@functools.lru_cache
def supports_fp8(device: torch.device) -> bool:
    """Whether kernels can read and write e4m3 (compute capability ≥ 8.9, interpreter)."""
    if device.type != "cuda":
        return True
    return not is_amd() and torch.cuda.get_device_capability(device) >= (8, 9)


def next_power_of_two(n: int) -> int:
    """The smallest power of two ≥ n, n ≥ 1."""
    return 1 << (n - 1).bit_length()


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape x to [rows, H] with contiguous columns; a view where the layout allows it."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def plan_elementwise_launch(x: torch.Tensor) -> tuple[int, int, int]:
    """(programs, values per program, warps) of an elementwise kernel on x.

    Small tensors get small blocks, so that all SMs have work.
    """
    count = x.numel()
    block = 256 if count < 4096 * sm_count(x.device) else 2048
    return -(-count // block), block, max(1, block // 256)


def plan_row_launch(x: torch.Tensor) -> tuple[int, int, int]:
    """(rows per program, padded width, warps) for kernels that hold whole rows in registers.

    x: [rows, width]. Narrow rows share a program, so that it loads enough data. 16 values per
    thread keep two 16-byte loads of a 16-bit type in flight.
    """
    rows, width = x.shape
    block = next_power_of_two(width)
    share = max(1, min(1024 // block, next_power_of_two(max(rows // (4 * sm_count(x.device)), 1))))
    return share, block, max(1, min(16, share * block // 512))
