"""Launch sizes of the matrix products: the defaults, and the few others that a build tries on its
device.

The defaults were measured on an H200, in whole steps: a tile that is best by itself need not be
where its first loads overlap the kernel in front. A choice made for another device is keyed by
rows, weight and dtype; only sizes that stand here are ever launched, whatever a file says.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from modelmill.ops.triton.device import max_shared_bytes, power_of_two, sm_count

GemmKey = tuple[int, int, int, torch.dtype]  # rows (see bucket), N, K, dtype of x
LaunchConfig = tuple[int, ...]
TunedConfigs = Mapping[GemmKey, LaunchConfig]

# One row: (rows of the weight a program, depth, warps), by bytes of a held value.
GEMV_CONFIGS: dict[int, tuple[LaunchConfig, ...]] = {
    1: (
        (1, 1024, 4),
        (2, 1024, 2),
        (4, 512, 2),
        (2, 2048, 4),
        (4, 1024, 4),
        (1, 2048, 4),
        (8, 512, 4),
    ),
    2: (
        (1, 1024, 4),
        (1, 4096, 4),
        (2, 4096, 8),
        (4, 1024, 4),
        (2, 2048, 4),
        (1, 2048, 4),
        (2, 1024, 4),
        (8, 512, 4),
    ),
    4: ((1, 1024, 4), (4, 1024, 4), (2, 1024, 4), (1, 2048, 4)),
}
# Several rows: (tokens a tile, rows of the weight, depth, stages, warps), by rows up to which they
# are tried.
GEMM_CONFIGS: dict[int, tuple[LaunchConfig, ...]] = {
    8: (
        *(
            (16, 32, 256, 5, 4),
            (16, 64, 128, 4, 4),
            (8, 64, 128, 3, 4),
            (8, 64, 128, 4, 4),
            (16, 32, 256, 4, 4),
        ),
        *((16, 16, 256, 6, 2), (16, 16, 512, 3, 4), (8, 32, 256, 5, 4)),
    ),
    16: (
        *((16, 32, 256, 5, 4), (16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (16, 64, 256, 3, 4)),
        *((16, 16, 256, 6, 2), (16, 16, 512, 3, 4), (16, 64, 128, 3, 4)),
    ),
    32: ((32, 32, 256, 3, 4), (32, 64, 128, 4, 4), (32, 64, 128, 3, 4)),
    64: ((64, 64, 128, 4, 4), (64, 64, 128, 3, 4), (64, 128, 64, 4, 8)),
    128: ((128, 128, 64, 4, 8), (128, 128, 64, 3, 8), (128, 64, 128, 3, 4)),
    256: ((256, 128, 64, 3, 8), (128, 128, 64, 4, 8)),
}
# The same of products with activations in 8 bits; the depth of a strip counts words of four values.
GEMV_8BIT_CONFIGS: tuple[LaunchConfig, ...] = (
    *(
        (4, 1024, 4),
        (2, 512, 2),
        (2, 1024, 4),
        (2, 1024, 8),
        (4, 1024, 8),
        (4, 512, 4),
        (1, 512, 4),
    ),
)
GEMM_8BIT_CONFIGS: dict[int, tuple[LaunchConfig, ...]] = {
    8: (
        (16, 32, 256, 4, 4),
        (8, 32, 256, 4, 4),
        (8, 64, 128, 4, 4),
        (16, 16, 512, 3, 4),
        (16, 64, 256, 3, 4),
    ),
    16: ((16, 32, 256, 4, 4), (16, 16, 512, 3, 4), (16, 64, 256, 3, 4), (16, 16, 256, 6, 2)),
    32: ((32, 64, 128, 4, 4), (32, 32, 256, 4, 4), (32, 64, 256, 3, 4)),
    64: ((64, 64, 128, 4, 4), (64, 64, 256, 3, 4), (64, 32, 256, 4, 4), (64, 128, 128, 4, 8)),
}
# no tensor core adds float32 exactly enough: plain multiply-adds, small tiles
FLOAT32_GEMM_CONFIG = (16, 32, 32, 2, 4)


def row_bucket(rows: int) -> int:
    """Rows that share a choice: 1, up to 8, 16, 32, 64, 128, and all beyond as 256."""
    return 1 if rows == 1 else min(256, max(8, power_of_two(rows)))


def gemm_key(x: torch.Tensor, weight: torch.Tensor) -> GemmKey:
    """The key of a product x [T, K] · weight [N, K]ᵀ."""
    return row_bucket(x.shape[0]), weight.shape[0], weight.shape[1], x.dtype


def candidates(key: GemmKey, weight_bytes: int, *, gated: bool = False) -> tuple[LaunchConfig, ...]:
    """The sizes that may be launched for a key. weight_bytes: bytes of a value of the weight.
    gated: two halves at once."""
    rows, _, k, dtype = key
    if rows > 1:
        return (FLOAT32_GEMM_CONFIG,) if dtype == torch.float32 else GEMM_CONFIGS[rows]
    whole = max(8, power_of_two(k))
    found = (
        (max(n, 2) if gated else n, min(depth, whole), warps)
        for n, depth, warps in GEMV_CONFIGS[weight_bytes]
    )
    return tuple(dict.fromkeys(found))


def candidates_8bit(key: GemmKey) -> tuple[LaunchConfig, ...]:
    """The same where activations are in 8 bits; none where they are not, or rows are many."""
    rows, _, _, dtype = key
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        return ()
    return GEMV_8BIT_CONFIGS if rows == 1 else GEMM_8BIT_CONFIGS.get(rows, ())


def gemv_config(
    x: torch.Tensor, weight: torch.Tensor, configs: TunedConfigs | None, *, gated: bool
) -> LaunchConfig:
    """(rows a program, depth, warps) of the product with one row."""
    picked = None if configs is None else configs.get(gemm_key(x, weight))
    if picked is not None:
        return picked
    rows, depth, warps = _default_gemv_config(weight)
    return (max(rows, 2) if gated else rows), depth, warps


def _default_gemv_config(weight: torch.Tensor) -> tuple[int, int, int]:
    n, k = weight.shape
    whole = max(8, power_of_two(k))
    if n < 4 * sm_count(weight.device):  # too few rows to share programs
        return 1, min(1024, whole), max(1, min(4, whole // 256))
    if weight.element_size() == 1:
        return (4, min(512, whole), 2) if n > 16384 else (2, min(1024, whole), 2)
    if n <= 4096 or weight.element_size() == 4:
        return 4, min(1024, whole), 4
    return (1, min(4096, whole), 4) if n <= 16384 else (2, min(4096, whole), 8)


def gemm_config(
    x: torch.Tensor, weight: torch.Tensor, configs: TunedConfigs | None
) -> LaunchConfig:
    """(tokens a tile, weight rows a tile, depth, stages, warps) of the product with several
    rows.
    """
    picked = None if configs is None else configs.get(gemm_key(x, weight))
    return (
        picked
        if picked is not None
        else fit_stages(_default_gemm_config(x, weight), x, weight, max_shared_bytes(x.device))
    )


def _default_gemm_config(x: torch.Tensor, weight: torch.Tensor) -> LaunchConfig:
    tokens, n, held = x.shape[0], weight.shape[0], weight.element_size()
    if x.dtype == torch.float32:
        return FLOAT32_GEMM_CONFIG
    if tokens <= 16:
        if held == 1:
            return 16, 32, 256, 4, 4
        if n < 64 * sm_count(x.device):
            return 16, 32, 256, 5, 4
        return (8, 64, 128, 3, 4) if tokens <= 8 and n > 16384 else (16, 64, 128, 4, 4)
    if tokens <= 64:
        return (32, 32, 256, 3, 4) if tokens <= 32 else (64, 64, 128, 4, 4)
    return (128, 128, 64, 4, 8) if tokens <= 128 else (256, 128, 64, 3, 8)


def fit_stages(
    sizes: LaunchConfig, x: torch.Tensor, weight: torch.Tensor, shared_limit: int
) -> LaunchConfig:
    """The same with fewer stages where their blocks would not fit into ``shared_limit`` bytes of
    shared memory.
    """
    tokens, rows, depth, stages, warps = sizes
    each = depth * (tokens * x.element_size() + rows * weight.element_size())
    return tokens, rows, depth, max(1, min(stages, shared_limit // each)), warps
