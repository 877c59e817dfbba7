"""Launch configs of the matrix products: defaults, and candidates for autotuning.

The defaults were measured on an H200 in whole steps: the tile that is fastest alone need not be
fastest where its first loads overlap the previous kernel. Autotuned choices are keyed by rows,
weight and dtype. Only configs listed here are ever launched, whatever an autotune file contains.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from modelmill.ops.triton.common.device import max_shared_bytes, next_power_of_two, sm_count

GemmKey = tuple[int, int, int, torch.dtype]  # row bucket (see row_bucket), N, K, dtype of x
LaunchConfig = tuple[int, ...]
TunedConfigs = Mapping[GemmKey, LaunchConfig]

# GEMV (one row): (weight rows per program, block of K, warps), by bytes per weight value.
GEMV_CONFIGS_BY_WEIGHT_BYTES: dict[int, tuple[LaunchConfig, ...]] = {
    1: (
        (1, 1024, 4), (2, 1024, 2), (4, 512, 2), (2, 2048, 4), (4, 1024, 4), (1, 2048, 4),
        (8, 512, 4),
    ),
    2: (
        (1, 1024, 4), (1, 4096, 4), (2, 4096, 8), (4, 1024, 4), (2, 2048, 4), (1, 2048, 4),
        (2, 1024, 4), (8, 512, 4),
    ),
    4: ((1, 1024, 4), (4, 1024, 4), (2, 1024, 4), (1, 2048, 4)),
}  # fmt: skip
# GEMM (several rows): (tokens per tile, weight rows per tile, block of K, stages, warps), by row
# bucket.
GEMM_CONFIGS_BY_ROW_BUCKET: dict[int, tuple[LaunchConfig, ...]] = {
    8: (
        (16, 32, 256, 5, 4), (16, 64, 128, 4, 4), (8, 64, 128, 3, 4), (8, 64, 128, 4, 4),
        (16, 32, 256, 4, 4), (16, 16, 256, 6, 2), (16, 16, 512, 3, 4), (8, 32, 256, 5, 4),
    ),
    16: (
        (16, 32, 256, 5, 4), (16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (16, 64, 256, 3, 4),
        (16, 16, 256, 6, 2), (16, 16, 512, 3, 4), (16, 64, 128, 3, 4),
    ),
    32: ((32, 32, 256, 3, 4), (32, 64, 128, 4, 4), (32, 64, 128, 3, 4)),
    64: ((64, 64, 128, 4, 4), (64, 64, 128, 3, 4), (64, 128, 64, 4, 8)),
    128: ((128, 128, 64, 4, 8), (128, 128, 64, 3, 8), (128, 64, 128, 3, 4)),
    256: ((256, 128, 64, 3, 8), (128, 128, 64, 4, 8)),
}  # fmt: skip
# The same for 8-bit activations; in the GEMV configs the block of K counts words of four values.
GEMV_8BIT_CONFIGS: tuple[LaunchConfig, ...] = (
    (4, 1024, 4), (2, 512, 2), (2, 1024, 4), (2, 1024, 8), (4, 1024, 8), (4, 512, 4), (1, 512, 4),
)  # fmt: skip
GEMM_8BIT_CONFIGS_BY_ROW_BUCKET: dict[int, tuple[LaunchConfig, ...]] = {
    8: (
        (16, 32, 256, 4, 4), (8, 32, 256, 4, 4), (8, 64, 128, 4, 4), (16, 16, 512, 3, 4),
        (16, 64, 256, 3, 4),
    ),
    16: ((16, 32, 256, 4, 4), (16, 16, 512, 3, 4), (16, 64, 256, 3, 4), (16, 16, 256, 6, 2)),
    32: ((32, 64, 128, 4, 4), (32, 32, 256, 4, 4), (32, 64, 256, 3, 4)),
    64: ((64, 64, 128, 4, 4), (64, 64, 256, 3, 4), (64, 32, 256, 4, 4), (64, 128, 128, 4, 8)),
}  # fmt: skip
# tensor cores are not exact enough for float32: FMA instructions, small tiles
FLOAT32_GEMM_CONFIG = (16, 32, 32, 2, 4)


def row_bucket(rows: int) -> int:
    """Number of rows rounded up to a bucket: 1, 8, 16, 32, 64, 128, or 256 for all beyond."""
    return 1 if rows == 1 else min(256, max(8, next_power_of_two(rows)))


def gemm_key(x: torch.Tensor, weight: torch.Tensor) -> GemmKey:
    """Key of a product x [T, K] · weight [N, K]ᵀ."""
    return row_bucket(x.shape[0]), weight.shape[0], weight.shape[1], x.dtype


def candidates(key: GemmKey, weight_bytes: int, *, gated: bool = False) -> tuple[LaunchConfig, ...]:
    """The configs that may be launched for a key.

    Args:
        key: a GEMM key.
        weight_bytes: bytes per weight value.
        gated: whether the kernel computes gate and up rows together.
    """
    rows, _, k, dtype = key
    if rows > 1:
        return (
            (FLOAT32_GEMM_CONFIG,) if dtype == torch.float32 else GEMM_CONFIGS_BY_ROW_BUCKET[rows]
        )
    padded_k = max(8, next_power_of_two(k))
    configs = (
        (max(n, 2) if gated else n, min(block_k, padded_k), warps)
        for n, block_k, warps in GEMV_CONFIGS_BY_WEIGHT_BYTES[weight_bytes]
    )
    return tuple(dict.fromkeys(configs))


def candidates_8bit(key: GemmKey) -> tuple[LaunchConfig, ...]:
    """The configs for 8-bit activations; none for other dtypes or many rows."""
    rows, _, _, dtype = key
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        return ()
    return GEMV_8BIT_CONFIGS if rows == 1 else GEMM_8BIT_CONFIGS_BY_ROW_BUCKET.get(rows, ())


def gemv_config(
    x: torch.Tensor, weight: torch.Tensor, configs: TunedConfigs | None, *, gated: bool
) -> LaunchConfig:
    """(weight rows per program, block of K, warps) of the product with one row."""
    picked = None if configs is None else configs.get(gemm_key(x, weight))
    if picked is not None:
        return picked
    rows, depth, warps = _default_gemv_config(weight)
    return (max(rows, 2) if gated else rows), depth, warps


def _default_gemv_config(weight: torch.Tensor) -> tuple[int, int, int]:
    n, k = weight.shape
    padded_k = max(8, next_power_of_two(k))
    if n < 4 * sm_count(weight.device):  # too few rows for several per program
        return 1, min(1024, padded_k), max(1, min(4, padded_k // 256))
    if weight.element_size() == 1:
        return (4, min(512, padded_k), 2) if n > 16384 else (2, min(1024, padded_k), 2)
    if n <= 4096 or weight.element_size() == 4:
        return 4, min(1024, padded_k), 4
    return (1, min(4096, padded_k), 4) if n <= 16384 else (2, min(4096, padded_k), 8)


def gemm_config(
    x: torch.Tensor, weight: torch.Tensor, configs: TunedConfigs | None
) -> LaunchConfig:
    """(tokens per tile, weight rows per tile, block of K, stages, warps) for several rows."""
    picked = None if configs is None else configs.get(gemm_key(x, weight))
    config = _default_gemm_config(x, weight) if picked is None else picked
    return fit_stages(config, x, weight, max_shared_bytes(x.device))


def _default_gemm_config(x: torch.Tensor, weight: torch.Tensor) -> LaunchConfig:
    tokens = x.shape[0]
    n = weight.shape[0]
    weight_bytes = weight.element_size()
    if x.dtype == torch.float32:
        return FLOAT32_GEMM_CONFIG
    if tokens <= 16:
        if weight_bytes == 1:
            return 16, 32, 256, 4, 4
        if n < 64 * sm_count(x.device):
            return 16, 32, 256, 5, 4
        return (8, 64, 128, 3, 4) if tokens <= 8 and n > 16384 else (16, 64, 128, 4, 4)
    if tokens <= 64:
        return (32, 32, 256, 3, 4) if tokens <= 32 else (64, 64, 128, 4, 4)
    return (128, 128, 64, 4, 8) if tokens <= 128 else (256, 128, 64, 3, 8)


def fit_stages(
    config: LaunchConfig, x: torch.Tensor, weight: torch.Tensor, shared_limit: int
) -> LaunchConfig:
    """Reduce the stages so that their blocks fit into ``shared_limit`` bytes of shared memory."""
    tokens, rows, block_k, stages, warps = config
    stage_bytes = block_k * (tokens * x.element_size() + rows * weight.element_size())
    return tokens, rows, block_k, max(1, min(stages, shared_limit // stage_bytes)), warps
