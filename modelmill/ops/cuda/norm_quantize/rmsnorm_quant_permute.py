"""RMSNorm with 8-bit output in permuted column order.

rmsnorm_quant_permute.cu serves many rows, rmsnorm_quant_permute_small_m.cu few.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.row_op_support import RowOpSupportRange, has_contiguous_tensors

DTYPE_DEFINES = {torch.bfloat16: (), torch.float16: ("HALF",)}
MAX_WIDTH = 8192
LARGE_M_MIN_ROWS = 256  # with fewer, what is kept of each column is not used often enough

SM_SHARED_BYTES = 226 * 1024  # bytes of an SM


SUPPORTED_PROBLEMS = (
    RowOpSupportRange(
        on_gpu=True,
        dtypes=tuple(DTYPE_DEFINES),
        same_dtype=True,
        dims=(2, 16),
        max_width=MAX_WIDTH,
        width_multiple=16,
        out_dtypes=(torch.int8, torch.float8_e4m3fn),
        packed_dtypes=True,
        permuted=True,
    ),
)


def supports(x: torch.Tensor, weight: torch.Tensor, eps: float, spec: ActQuantSpec) -> bool:
    """Whether all operands are contiguous and aligned to 16 bytes."""
    return has_contiguous_tensors(spec) and all(
        each is None or (each.is_contiguous() and each.data_ptr() % 16 == 0)
        for each in (x, weight, *spec[1:4])
    )


@dataclass(frozen=True)
class RmsNormQuantKernelConfig:
    """Kernel config: threads per block, blocks per SM, pipeline stages, shared memory bytes."""

    threads: int
    blocks_per_sm: int
    stages: int
    shared_bytes: int


def config_for(
    width: int, columns: int, rows: int, stages: int = 1, threads_per_sm: int = 1024
) -> RmsNormQuantKernelConfig:
    """For groups of so many rows of ``width`` 16-bit values (with a residual, twice as many).

    stages: groups ahead at most; threads_per_sm: threads that an SM has room for, or is
    best left with.
    """
    threads = -(-max(width, columns) // 256) * 32
    # static: sums and barriers, and the system's own
    exchange, stage, static = 4 * width + 16, 2 * width * rows, 2048
    blocks = max(
        1, min(threads_per_sm // threads, 8, SM_SHARED_BYTES // (stage + exchange + static))
    )
    stages = max(1, min(stages, (SM_SHARED_BYTES // blocks - exchange - static) // stage))
    return RmsNormQuantKernelConfig(threads, blocks, stages, exchange + stages * stage)


def rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    spec: ActQuantSpec,
    config: RmsNormQuantKernelConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (values, scale or None); the sum overwrites the residual.

    config: default ``config_for``.
    """
    dtype, factor, zero, order, bits = spec
    assert order is not None
    width = x.shape[-1]
    columns = order.numel()
    rows = x.numel() // x.shape[-1]
    values = torch.empty((*x.shape[:-1], columns), dtype=dtype, device=x.device)
    scale = (
        torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if factor is None else None
    )
    each = factor is not None and factor.numel() > 1
    macros = [f"WIDTH={width}", f"COLUMNS={columns}", f"ADD_RESIDUAL={int(residual is not None)}"]
    macros += [
        f"PER_TOKEN={int(factor is None)}",
        f"PER_COLUMN={int(each)}",
        f"ZERO_POINTS={int(zero is not None)}",
    ]
    macros += [*DTYPE_DEFINES[x.dtype], *(() if dtype is torch.int8 else ("FP8",))]
    most = 448.0 if dtype is not torch.int8 else float(2 ** (bits - 1) - 1)
    device, pointers = (
        x.get_device(),
        launch.data_pointers(x, weight, residual, values, scale, factor, zero, order),
    )
    with torch.cuda.device(x.device):
        if rows < LARGE_M_MIN_ROWS and config is None:
            threads = -(-max(width, columns) // 256) * 32
            macros.append(f"SINGLE_ROW={int(rows == 1)}")
            kernel = launch.compile_and_load_kernel(
                "rmsnorm_quant_permute_small_m",
                "rmsnorm_quant_permute_small_m",
                tuple(macros),
                threads,
                0,
                device,
            )
            kernel.launch(rows, struct.pack("=8Q2f", *pointers, eps, most), pdl=True)
            return values, scale
        together = 2 if each or zero is not None else 4
        # two rows in 16 bits are sooner done than brought, four in bytes the other way round
        config = config or config_for(
            width,
            columns,
            together if residual is None else 2 * together,
            stages=2 if together == 2 else 1,
            threads_per_sm=1024 if residual is None else 512,
        )
        macros += [f"BLOCKS={config.blocks_per_sm}", f"STAGES={config.stages}"]
        kernel = launch.compile_and_load_kernel(
            "rmsnorm_quant_permute",
            "rmsnorm_quant_permute",
            tuple(macros),
            config.threads,
            config.shared_bytes,
            device,
        )
        blocks = min(-(-rows // together), config.blocks_per_sm * launch.sm_count(device))
        kernel.launch(blocks, struct.pack("=8Qq2f", *pointers, rows, eps, most), pdl=True)
    return values, scale
