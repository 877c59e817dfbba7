"""The experts of a mixture with quantized weights, few rows for each (grouped_gemm_wq.cu).

Four launches: alignment (moe_align.cu), the products of gate and up with the activation, the
product of down, and the sum over a token's experts (moe_combine.cu).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch

from modelmill.ops.cuda.common import build, launch
from modelmill.ops.cuda.moe import moe_align_block_size
from modelmill.ops.cuda.weight_only_gemm.weight_only import DTYPE_DEFINES
from modelmill.ops.fused_moe import GATE_ACTIVATIONS, FusedMoEInputs
from modelmill.ops.moe_support import MoEProblem, MoESupportRange, make_moe_problem

INT4_FORMAT_CODE, E2M1_FORMAT_CODE, INT8_FORMAT_CODE = 0, 1, 2
FORMAT_CODE_BY_DTYPES: dict[tuple[torch.dtype | None, torch.dtype | None], int] = {
    (torch.uint8, torch.float16): INT4_FORMAT_CODE,
    (torch.uint8, torch.uint8): E2M1_FORMAT_CODE,
    (torch.int8, torch.float32): INT8_FORMAT_CODE,
}
"""By the dtypes of weights and scales."""
_CLAMPED_GATE_CODE = len(GATE_ACTIVATIONS)  # GATE of a SwigluOaiParams
MAX_TOKENS, MAX_PAIRS_PER_EXPERT = 512, 64
"""Tokens of a step, and pairs for each expert, for which the kernel is made."""
MAX_PAIRS_PER_EXPERT_BY_TOKEN_TILES = ((1, 3.0), (2, 8.0), (3, 12.0), (4, float("inf")))
"""Tiles of 8 pairs in a block → pairs for each expert, on average, up to which they are chosen."""
MAX_BLOCKS_PER_EXPERT = 3
"""Blocks of pairs, on average, each of which converts an expert's weights again. Estimated: with
rows so long that a block has 8 pairs only, Triton's tiles of more pairs are faster beyond it."""
MAX_STAGE_BYTES = 24 << 10  # of the weight; more rows only where one tile has more
MAX_STAGES = 8
L2_REUSE_STAGES = 8  # stages that two large blocks of pairs share in turn, so that L2 has them
BLOCKS_PER_SM = (2, 3, 1)
# fewer do not hide latency, more have too little between barriers
PREFERRED_WARPS_PER_SM_RANGE = (12, 20)
# of an SM: 4.2 TB/s times 1 us is 32 KiB, and blocks of pairs change
MIN_BYTES_IN_FLIGHT = 80 << 10
_SM_SHARED_BYTES, _MAX_SHARED_BYTES, _BLOCK_RESERVED_BYTES = 227 << 10, 226 << 10, 1 << 10
_MAX_WARPS = 16
_SM_QUARTER_REGISTERS, _OTHER_REGISTERS = 16384, 40
# of an SM's memory: what the blocks that are to run side by side need (ops/carveout.py)
_CARVEOUT_PERCENT = 100
_COMBINE_THREADS, _COMBINE_COLUMNS_PER_THREAD = 128, 8


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles a common config (cached on disk), once for all formats.
    """
    product = GroupedGemmSpec(INT4_FORMAT_CODE, 2048, 768, 128, True, True, False)
    config = select_config(product, 1)
    assert config is not None, "a common size"
    macros = kernel_macros(torch.bfloat16, product, config, 0)
    return build.kernel_compile_failure_reason(device_type, "grouped_gemm_wq", macros)


class GroupedGemmSpec(NamedTuple):
    """One of the two products as its kernel is compiled for it.

    Attributes:
        weight_format: INT4_FORMAT_CODE, E2M1_FORMAT_CODE or INT8_FORMAT_CODE.
        k: columns of the weight.
        n: columns of the output.
        group: columns of a scale.
        gated: whether it is the first product, with gate and up.
        offset: whether groups have offsets.
        bias: whether there is a bias.
    """

    weight_format: int
    k: int
    n: int
    group: int
    gated: bool
    offset: bool
    bias: bool

    @property
    def weight_row_bytes(self) -> int:
        """Of a row of the weight."""
        return self.k if self.weight_format == INT8_FORMAT_CODE else self.k // 2

    @property
    def row_scale_bytes(self) -> int:
        """Of a row's scales."""
        if self.weight_format == INT8_FORMAT_CODE:
            return 4
        return self.k // 32 if self.weight_format == E2M1_FORMAT_CODE else self.k // self.group * 2

    @property
    def row_scale_offset_bias_bytes(self) -> int:
        """Of a row's scales, offsets and bias."""
        return self.row_scale_bytes * (2 if self.offset else 1) + (2 if self.bias else 0)


class GroupedGemmConfig(NamedTuple):
    """How the kernel is compiled; see grouped_gemm_wq.cu."""

    k_tile: int
    warps: int
    token_tiles: int
    row_tiles: int
    stages: int
    blocks: int
    chunk: int

    def stage_bytes(self, product: GroupedGemmSpec) -> int:
        """Shared memory of a stage."""
        words = self.k_tile // (16 if product.weight_format == INT8_FORMAT_CODE else 32)
        skew = 0 if product.weight_row_bytes % 128 else 16 * words
        return (
            16 * self.row_tiles * (product.weight_row_bytes + product.row_scale_offset_bias_bytes)
            + skew
        )

    def non_stage_shared_bytes(self, product: GroupedGemmSpec) -> int:
        """Shared memory behind the stages."""
        tiles = product.k // self.k_tile
        partial = 2 * self.row_tiles * self.token_tiles * self.warps * 512
        return (
            partial + tiles * self.token_tiles * 32 + 64 * self.token_tiles + 8 * (MAX_STAGES + 4)
        )

    def shared_bytes(self, product: GroupedGemmSpec) -> int:
        """Shared memory of a block."""
        return self.stages * self.stage_bytes(product) + self.non_stage_shared_bytes(product)

    def fits_registers(self, product: GroupedGemmSpec) -> bool:
        """Whether a thread's columns of x and sums fit beside what else it needs."""
        per_quarter = -(-self.warps * self.blocks // 4)
        limit = min(255, _SM_QUARTER_REGISTERS // (32 * per_quarter) // 8 * 8)
        x = product.k * self.token_tiles // (8 * self.warps)
        tiles = product.k // (self.k_tile * self.warps)
        # products of codes beside the sums of several K tiles, and the scales of some of them
        both = product.weight_format == INT4_FORMAT_CODE and tiles > 1
        needed = x + 4 * self.token_tiles * (2 if both else 1) + (16 if both and tiles > 3 else 0)
        return needed <= limit - _OTHER_REGISTERS

    def with_most_stages(self, product: GroupedGemmSpec) -> GroupedGemmConfig | None:
        """The same with as many stages as there is room for; None if they are too few."""
        room = min(_MAX_SHARED_BYTES, _SM_SHARED_BYTES // self.blocks - _BLOCK_RESERVED_BYTES)
        left = room - self.non_stage_shared_bytes(product)
        stages = min(MAX_STAGES, left // self.stage_bytes(product))
        return self._replace(stages=stages) if stages >= 3 else None


@functools.lru_cache(1024)
def make_gemm_specs(problem: MoEProblem) -> tuple[GroupedGemmSpec, GroupedGemmSpec] | None:
    """Both products of a problem; None where the kernel has not their format."""
    weight_format = FORMAT_CODE_BY_DTYPES.get((problem.weight_dtype, problem.scale_dtype))
    hidden, inner = problem.hidden, problem.inner
    if weight_format is None or hidden % 32 or inner % 32:
        return None
    made = []
    for k, n, gated in ((hidden, inner, True), (inner, hidden, False)):
        group = k if weight_format == INT8_FORMAT_CODE else min(problem.group, k)
        if (
            group == 0
            or k % group
            or group % 32
            or (weight_format == E2M1_FORMAT_CODE and group != 32)
        ):
            return None
        made.append(
            GroupedGemmSpec(weight_format, k, n, group, gated, problem.offset, problem.bias)
        )
    return made[0], made[1]


@functools.lru_cache(1024)
def select_config(product: GroupedGemmSpec, token_tiles: int) -> GroupedGemmConfig | None:
    """The config that fills an SM best, or None where none fits."""

    def preference(config: GroupedGemmConfig) -> tuple[float, ...]:
        in_flight = config.blocks * config.stages * config.stage_bytes(product)
        warps = config.warps * config.blocks
        return (
            in_flight >= MIN_BYTES_IN_FLIGHT,
            PREFERRED_WARPS_PER_SM_RANGE[0] <= warps <= PREFERRED_WARPS_PER_SM_RANGE[1],
            config.k_tile,
            config.blocks > 1,  # one computes while the other one is at a barrier
            config.row_tiles,
            -abs(warps - sum(PREFERRED_WARPS_PER_SM_RANGE) / 2),
        )

    fitting = [
        made
        for config in _candidate_configs(product, token_tiles)
        if config.fits_registers(product) and (made := config.with_most_stages(product)) is not None
    ]
    return max(fitting, key=preference, default=None)


def _candidate_configs(product: GroupedGemmSpec, token_tiles: int) -> Iterator[GroupedGemmConfig]:
    """All configs but for their stages."""
    for row_tiles in _allowed_row_tiles(product):
        per_block = product.n // (row_tiles * (8 if product.gated else 16))
        chunk = per_block
        if token_tiles == MAX_PAIRS_PER_EXPERT_BY_TOKEN_TILES[-1][0]:
            chunk = next(each for each in range(L2_REUSE_STAGES, 0, -1) if per_block % each == 0)
        for k_tile in (64, 32) if product.weight_format == INT8_FORMAT_CODE else (128, 64, 32):
            if product.k % k_tile or (
                product.weight_format == INT4_FORMAT_CODE and product.group % k_tile
            ):
                continue
            tiles = product.k // k_tile
            for warps in range(min(tiles, _MAX_WARPS), 0, -1):
                if tiles % warps == 0:
                    for blocks in BLOCKS_PER_SM:
                        yield GroupedGemmConfig(
                            k_tile, warps, token_tiles, row_tiles, 0, blocks, chunk
                        )


def _allowed_row_tiles(product: GroupedGemmSpec) -> Iterator[int]:
    """Tiles of 16 weight rows that a stage may have: all it copies is in pieces of 16 bytes."""
    for tiles in (4, 2, 1):
        small = tiles == 1 or 16 * tiles * product.weight_row_bytes <= MAX_STAGE_BYTES
        whole = product.n % (tiles * (8 if product.gated else 16)) == 0
        if small and whole and 8 * tiles * product.row_scale_bytes % 16 == 0:
            yield tiles


@functools.lru_cache(1024)
def select_config_pair(problem: MoEProblem) -> tuple[GroupedGemmConfig, GroupedGemmConfig] | None:
    """The configs of both products, of the same blocks of pairs; None where none fit."""
    products = make_gemm_specs(problem)
    if products is None:
        return None
    average = problem.pairs_per_expert
    preferred = next(
        tiles for tiles, most in MAX_PAIRS_PER_EXPERT_BY_TOKEN_TILES if average <= most
    )
    for tiles in range(preferred, 0, -1):
        first, second = (select_config(product, tiles) for product in products)
        if first is not None and second is not None:
            return first, second
    return None


def fits_kernel_limits(problem: MoEProblem) -> bool:
    """Whether the kernel can be compiled for these sizes, whatever the number of tokens."""
    return (
        problem.device >= 0
        and problem.experts <= moe_align_block_size.MAX_EXPERTS
        and problem.top_k * MAX_TOKENS <= moe_align_block_size.MAX_PAIRS
        and select_config_pair(problem) is not None
    )


def has_few_blocks_per_expert(problem: MoEProblem) -> bool:
    """Whether the pairs of an expert are few blocks; see ``MAX_BLOCKS_PER_EXPERT``."""
    configs = select_config_pair(problem)
    if configs is None:
        return False
    return problem.pairs_per_expert <= MAX_BLOCKS_PER_EXPERT * 8 * configs[0].token_tiles


def moe_support_range(
    min_tokens: int,
    dtypes: tuple[torch.dtype, ...],
    weight_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    *,
    offset: bool = False,
    max_pairs: float = MAX_PAIRS_PER_EXPERT,
) -> MoESupportRange:
    """Mixtures of one weight format that the kernel serves; arguments as of ``MoESupportRange``."""
    return MoESupportRange(
        m=(min_tokens, MAX_TOKENS),
        dtypes=dtypes,
        weight_dtype=weight_dtype,
        scale_dtypes=(scale_dtype,),
        max_pairs_per_expert=max_pairs,
        offset=offset,
        ungated=False,
        fits=fits_kernel_limits,
        faster=has_few_blocks_per_expert,
    )


def supports(inputs: FusedMoEInputs) -> bool:
    """Whether all operands are packed and aligned.

    Scales, offsets and biases belong to both products or to none.
    """
    x, shared = inputs.x, inputs.shared
    packed = [inputs.topk_weights, inputs.topk_ids, inputs.gate_up, inputs.down]
    for first, second in (
        (inputs.gate_up_scale, inputs.down_scale),
        (inputs.gate_up_offset, inputs.down_offset),
        (inputs.gate_up_bias, inputs.down_bias),
    ):
        if (first is None) != (second is None):
            return False
        packed += [each for each in (first, second) if each is not None]
    biases = (inputs.gate_up_bias, inputs.down_bias)
    offsets = (inputs.gate_up_offset, inputs.down_offset)
    return (
        x.is_cuda
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in packed)
        and x.data_ptr() % 16 == 0
        and inputs.topk_ids.dtype == torch.int32
        and inputs.topk_weights.dtype == torch.float32
        and all(bias is None or bias.dtype == x.dtype for bias in biases)
        and all(offset is None or offset.dtype == torch.float16 for offset in offsets)
        and (shared is None or (shared.is_contiguous() and shared.data_ptr() % 16 == 0))
        and (shared is None or shared.dtype == x.dtype)
        and (inputs.clamp is not None or inputs.activation in GATE_ACTIVATIONS)
    )


def run(inputs: FusedMoEInputs) -> torch.Tensor:
    """The weighted sum [T, H] over the experts of each token, plus the shared expert's output."""
    problem = make_moe_problem(*inputs)
    products, configs = make_gemm_specs(problem), select_config_pair(problem)
    assert products is not None, "see fits_kernel_limits"
    assert configs is not None, "see fits_kernel_limits"
    x, ids = inputs.x, inputs.topk_ids
    with torch.cuda.device(x.device):
        block_size = 8 * configs[0].token_tiles
        order = moe_align_block_size.run(ids, block_size, problem.experts)
        inner = torch.empty((len(order[0]), problem.inner), dtype=x.dtype, device=x.device)
        by_pair = torch.empty((ids.numel(), problem.hidden), dtype=x.dtype, device=x.device)
        for product, config, source, out in zip(
            products, configs, (x, inner), (inner, by_pair), strict=True
        ):
            _launch_grouped_gemm(inputs, product, config, source, out, order)
        return _combine_expert_outputs(inputs, by_pair)


def _launch_grouped_gemm(
    inputs: FusedMoEInputs,
    product: GroupedGemmSpec,
    config: GroupedGemmConfig,
    x: torch.Tensor,
    out: torch.Tensor,
    order: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """One grouped product of the sorted pairs."""
    name, device = "gate_up" if product.gated else "down", x.get_device()
    operands = [getattr(inputs, name + part) for part in ("", "_scale", "_offset", "_bias")]
    gate = gate_macro_value(inputs)
    kernel = launch.compile_and_load_kernel(
        "grouped_gemm_wq", "grouped_gemm_wq", kernel_macros(x.dtype, product, config, gate),
        32 * config.warps, config.shared_bytes(product), device, _CARVEOUT_PERCENT,
    )  # fmt: skip
    sizes = (inputs.topk_ids.numel(), len(order[1]), inputs.topk_ids.shape[1], x.stride(0))
    pointers = launch.data_pointers(*operands, x, out, *order)
    work = struct.pack("=8Q4i2f", *pointers, *sizes, *(inputs.clamp or (0.0, 0.0)))
    kernel.launch(launch.sm_count(device) * config.blocks, work, pdl=True)


def _combine_expert_outputs(inputs: FusedMoEInputs, by_pair: torch.Tensor) -> torch.Tensor:
    """The sum over a token's experts."""
    x, ids = inputs.x, inputs.topk_ids
    tokens, hidden = x.shape
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    kernel = launch.compile_and_load_kernel(
        "moe_combine", "moe_combine", DTYPE_DEFINES[x.dtype], _COMBINE_THREADS, 0, x.get_device()
    )
    pointers = launch.data_pointers(by_pair, ids, inputs.topk_weights, inputs.shared, out)
    work = struct.pack("=5Q3i4x", *pointers, tokens, ids.shape[1], hidden)
    threads = tokens * hidden // _COMBINE_COLUMNS_PER_THREAD
    kernel.launch(-(-threads // _COMBINE_THREADS), work, pdl=True)
    return out


def gate_macro_value(inputs: FusedMoEInputs) -> int:
    """GATE of moe_activation.cuh."""
    return (
        _CLAMPED_GATE_CODE
        if inputs.clamp is not None
        else GATE_ACTIVATIONS.index(inputs.activation)
    )


@functools.lru_cache(1024)
def kernel_macros(
    dtype: torch.dtype, product: GroupedGemmSpec, config: GroupedGemmConfig, gate: int
) -> tuple[str, ...]:
    """Macros of the kernel."""
    sizes = {
        "FORMAT": product.weight_format,
        "K": product.k,
        "N": product.n,
        "GROUP": product.group,
        "GATED": product.gated,
        "OFFSET": product.offset,
        "BIAS": product.bias,
        "GATE": gate if product.gated else 0,
    }
    sizes |= {
        "K_TILE": config.k_tile,
        "WARPS": config.warps,
        "TOKEN_TILES": config.token_tiles,
        "ROW_TILES": config.row_tiles,
        "STAGES": config.stages,
        "BLOCKS": config.blocks,
        "CHUNK": config.chunk,
    }
    return (*(f"{name}={int(size)}" for name, size in sizes.items()), *DTYPE_DEFINES[dtype])
