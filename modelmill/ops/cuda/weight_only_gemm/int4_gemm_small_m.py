"""Weight-only int4 GEMM for 9 to 64 rows by TMA and wgmma (int4_gemm_small_m.cu)."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeVar

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.weight_only_gemm.weight_only import K_TILE, RUN, TYPES, group_shift
from modelmill.ops.groupwise import GroupwiseLinearInputs, groupwise_problem
from modelmill.ops.kernel_range import GemmProblem, GemmRange, Kernel

MAX_ROWS = 64
_MAX_SHARED_BYTES = 220 << 10  # bytes of a block at most
MIN_K_TILES_PER_SPLIT = 4  # pieces of K that a block of a cluster is worth


class SplitKConfig(Protocol):
    """Config fields that determine occupancy: consumer warpgroups per block and split-K."""

    @property
    def consumers(self) -> int:
        """Consumer warpgroups per block."""
        ...

    @property
    def split_k(self) -> int:
        """Blocks of a cluster that share K."""
        ...


SplitKConfigT = TypeVar("SplitKConfigT", bound=SplitKConfig)


class Int4GemmKernelConfig(NamedTuple):
    """Kernel config: consumer warpgroups, split-K, K tiles of weights in flight, stages of x."""

    consumers: int
    split_k: int
    prefetch_depth: int
    stages: int


KERNEL_CONFIGS = tuple(
    Int4GemmKernelConfig(*each, 4)
    for each in ((2, 1, 4), (2, 2, 4), (2, 4, 4), (3, 1, 2), (3, 2, 2), (3, 4, 2))
)


def padded_rows(tokens: int) -> int:
    """Rows of x that the kernel is compiled for."""
    return 32 if tokens <= 32 else 64


def groups_per_split(k_tiles: int, split_k: int, group_shift: int) -> int:
    """Most groups that one split of K touches.

    group_shift: log2 of the K tiles per group.
    """
    each = -(-k_tiles // split_k)
    ends = [(begin, min(begin + each, k_tiles)) for begin in range(0, k_tiles, each)]
    return max(((end - 1) >> group_shift) - (begin >> group_shift) + 1 for begin, end in ends)


def shared_bytes(config: Int4GemmKernelConfig, padded: int, groups: int) -> int:
    """Bytes of a block's shared memory."""
    rows = 64 * config.consumers
    return (
        config.stages * padded * 256
        + groups * padded * 4
        + rows * (groups + 1) * 8
        + 16 * config.stages
    )


def config_for(
    rows: int, columns: int, group: int, padded: int, num_sms: int
) -> Int4GemmKernelConfig | None:
    """The config with the best occupancy of ``num_sms`` SMs for ``rows`` weight rows, or None."""
    pieces, by = -(-columns // K_TILE), group_shift(group, columns)
    if by is None:
        return None
    fitting = [
        form
        for form in KERNEL_CONFIGS
        if (form.split_k == 1 or pieces >= MIN_K_TILES_PER_SPLIT * form.split_k)
        and shared_bytes(form, padded, groups_per_split(pieces, form.split_k, by))
        <= _MAX_SHARED_BYTES
        and form.stages * padded * 256 >= padded * (64 * form.consumers + 4) * 4
    ]
    return lowest_cost_config(fitting, rows, num_sms)


def lowest_cost_config(
    configs: Iterable[SplitKConfigT], rows: int, num_sms: int, m_tiles: int = 1
) -> SplitKConfigT | None:
    """The config with the best occupancy of ``num_sms`` SMs for ``rows`` weight rows, or None.

    m_tiles: blocks along the rows of x.
    """

    def cost(form: SplitKConfigT) -> tuple[float, int]:
        # clusters of four do not fill every group of SMs
        places = num_sms if form.split_k <= 2 else num_sms * 9 // 10
        tiles = -(-rows // (64 * form.consumers)) * m_tiles
        waves = -(-tiles * form.split_k // places)
        return waves * form.consumers / form.split_k, waves

    return min(configs, key=cost, default=None)


def problem_config(problem: GemmProblem) -> Int4GemmKernelConfig | None:
    """How the kernel is compiled for a product; None where it does not serve it."""
    if problem.device < 0:
        return None
    padded, num_sms = padded_rows(problem.m), launch.sm_count(problem.device)
    return config_for(problem.n, problem.k, problem.group, padded, num_sms)


def groupwise_gemm(inputs: GroupwiseLinearInputs, *, gated: bool) -> torch.Tensor:
    """``int4_gemm`` with the config for these operands."""
    config = problem_config(groupwise_problem(*inputs))
    assert config is not None, "see small_m_kernel"
    return int4_gemm(inputs, config, gated=gated)


def _fits(problem: GemmProblem) -> bool:
    return problem_config(problem) is not None


def small_m_kernel(m: tuple[int, int], *, gated: bool) -> Kernel:
    """The kernel as one of the 4-bit GEMMs', for so many rows (all ≤ 32, or all above)."""
    return Kernel(GemmRange(m=m, fits=_fits), functools.partial(groupwise_gemm, gated=gated))


def int4_gemm(
    inputs: GroupwiseLinearInputs, config: Int4GemmKernelConfig, *, gated: bool
) -> torch.Tensor:
    """X [T, K] · weightᵀ → [T, N]; gated: silu(first half) · second half of it, [T, N / 2]."""
    x, weight, scale, offset, group, bias = inputs
    tokens, columns = x.shape
    rows, groups = weight.shape[0], scale.shape[1]
    out = torch.empty((tokens, rows // 2 if gated else rows), dtype=x.dtype, device=x.device)
    box, by = padded_rows(tokens), group_shift(group, columns)
    assert by is not None
    sums = torch.empty((groups, box), dtype=torch.float32, device=x.device)
    share, device = groups_per_split(-(-columns // K_TILE), config.split_k, by), x.get_device()
    with torch.cuda.device(x.device):
        macros = _kernel_macros(x.dtype, config, box, offset=offset is not None, gated=gated)
        add = launch.load_kernel("int4_gemm_small_m", "group_sums", macros, 256, 0, device)
        counts = (tokens, columns, x.stride(0), groups, group)
        add.launch(
            -(-groups * box // 8),
            struct.pack("=2Q5i4x", x.data_ptr(), sums.data_ptr(), *counts),
            pdl=True,
        )
        threads, size = 128 * config.consumers + 32, shared_bytes(config, box, share)
        kernel = launch.load_kernel(
            "int4_gemm_small_m", "int4_gemm_small_m", macros, threads, size, device
        )
        strides = (x.stride(0) * x.element_size(),)
        x_map = launch.tensor_map(x.data_ptr(), x.dtype, (columns, tokens), strides, (64, box))
        pointers = launch.data_pointers(weight, scale, offset, sums, bias, out)
        work = struct.pack("=6Q6i", *pointers, tokens, rows, columns // RUN, groups, by, share)
        kernel.launch(config.split_k * -(-rows // (64 * config.consumers)), x_map, work, pdl=True)
    return out


def _kernel_macros(
    dtype: torch.dtype, config: Int4GemmKernelConfig, padded: int, *, offset: bool, gated: bool
) -> tuple[str, ...]:
    sizes = {
        "BLOCK_M": padded,
        "CONSUMERS": config.consumers,
        "SPLIT": config.split_k,
        "PREFETCH": config.prefetch_depth,
        "STAGES": config.stages,
    }
    switches = {"GATED": int(gated), "OFFSET": int(offset)}
    return (*(f"{name}={size}" for name, size in (sizes | switches).items()), *TYPES[dtype])
