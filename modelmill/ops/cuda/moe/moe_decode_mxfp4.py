"""The experts of one token in MXFP4, in two launches (moe_decode_mxfp4.cu).

The first computes gate and up with the activation, the second down and the weighted sum.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import NamedTuple

import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.moe.grouped_gemm_wq import (
    E2M1_FORMAT_CODE,
    GroupedGemmSpec,
    gate_macro_value,
    make_gemm_specs,
)
from modelmill.ops.cuda.weight_only_gemm.weight_only import DTYPE_DEFINES
from modelmill.ops.fused_moe import FusedMoEInputs
from modelmill.ops.moe_support import MoEProblem, MoESupportRange, make_moe_problem

K_TILE = 32
OUTPUT_TILE_ROWS = 8
MAX_TOP_K = 16
MAX_WARPS = 16
"""That multiply, in a block. Many are fastest, since what takes time is the latency of converting
codes; 18 were slower than 15."""
X_PADDING_COLUMNS = 32
"""Columns between the inputs of two experts: so they begin in different banks."""
GATE_UP_SHARED_BYTES = 132 << 10
"""Of a block of the first product: one of the second fits beside it, and loads weights early."""
MIN_GATE_UP_SHARED_BYTES = 114 << 10
"""Requested at least: two blocks would share an SM and leave another one idle. A launch places
blocks while those of the kernel before are on some of the SMs."""
MAX_SHARED_BYTES, _BLOCK_RESERVED_BYTES = 226 << 10, 1 << 10
_CARVEOUT_PERCENT = 100


class MoEDecodeConfig(NamedTuple):
    """How the kernel is compiled; see moe_decode_mxfp4.cu."""

    warps: int
    ways: int
    output_tiles_per_block: int
    ring: int = 0

    def stage_bytes(self, product: GroupedGemmSpec) -> int:
        """Shared memory of a stage."""
        skew = 0 if product.weight_row_bytes % 128 else 16
        return 2 * OUTPUT_TILE_ROWS * (product.weight_row_bytes + product.row_scale_bytes) + skew

    def non_stage_shared_bytes(self, product: GroupedGemmSpec, top_k: int) -> int:
        """Shared memory behind the stages."""
        x = 2 * product.k if product.gated else 2 * top_k * (product.k + X_PADDING_COLUMNS)
        parts = self.warps * (2 if product.gated else self.ways)
        barriers = stages_per_output_tile(product, top_k) + 2 * self.ring * self.ways
        return x + 4 * OUTPUT_TILE_ROWS * self.output_tiles_per_block * parts + 8 * barriers

    def shared_bytes(self, product: GroupedGemmSpec, top_k: int) -> int:
        """Shared memory of a block."""
        used = self.ring * self.ways * self.stage_bytes(product) + self.non_stage_shared_bytes(
            product, top_k
        )
        return max(used, MIN_GATE_UP_SHARED_BYTES) if product.gated else used

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.warps * self.ways + 1)

    def stages_per_team(self, product: GroupedGemmSpec, top_k: int) -> int:
        """That a team has to read."""
        if product.gated:
            return -(-self.output_tiles_per_block // self.ways)
        return -(-stages_per_output_tile(product, top_k) // self.ways) * self.output_tiles_per_block

    def with_max_ring_stages(
        self, product: GroupedGemmSpec, top_k: int, room: int
    ) -> MoEDecodeConfig | None:
        """The same with as many stages as are of use and fit.

        None where a team would have one place for several stages. room: shared memory, exceeded
        where two stages of a team do not fit.
        """
        needed = self.stages_per_team(product, top_k)
        for size in (room, MAX_SHARED_BYTES):
            left = size - self.non_stage_shared_bytes(product, top_k)
            ring = min(needed, left // ((self.stage_bytes(product) + 16) * self.ways))
            if ring >= min(needed, 2):
                return self._replace(ring=ring)
        return None


def stages_per_output_tile(product: GroupedGemmSpec, top_k: int) -> int:
    """Stages that give the 8 rows of an output tile; the second product has two experts in each."""
    return 1 if product.gated else -(-top_k // 2)


def num_output_tiles(product: GroupedGemmSpec, top_k: int) -> int:
    """Of the whole product."""
    return product.n // OUTPUT_TILE_ROWS * (top_k if product.gated else 1)


@functools.lru_cache(1024)
def select_config(
    product: GroupedGemmSpec, top_k: int, sms: int, room: int
) -> MoEDecodeConfig | None:
    """The config for a device of so many SMs, or None where none fits.

    room: shared memory of a block, exceeded where two stages do not fit.
    """
    fitting = [
        made
        for config in _candidate_configs(product, top_k, sms)
        if (made := config.with_max_ring_stages(product, top_k, room)) is not None
    ]

    def preference(config: MoEDecodeConfig) -> tuple[int, ...]:
        shared = (
            config.output_tiles_per_block
            if product.gated
            else stages_per_output_tile(product, top_k)
        )
        uneven = -shared % config.ways  # turns in which a team has no stage
        return -uneven, config.warps * config.ways, config.warps

    return max(fitting, key=preference, default=None)


def _candidate_configs(product: GroupedGemmSpec, top_k: int, sms: int) -> Iterator[MoEDecodeConfig]:
    """All configs but for their stages."""
    output_tiles_per_block = -(-num_output_tiles(product, top_k) // sms)
    tiles = product.k // K_TILE
    teams = MAX_WARPS if product.gated else stages_per_output_tile(product, top_k)
    for warps in (each for each in range(1, MAX_WARPS + 1) if tiles % each == 0):
        for ways in range(1, min(MAX_WARPS // warps, teams) + 1):
            config = MoEDecodeConfig(warps, ways, output_tiles_per_block)
            if OUTPUT_TILE_ROWS * output_tiles_per_block <= config.threads:
                yield config


@functools.lru_cache(1024)
def select_config_pair(
    problem: MoEProblem, sms: int
) -> tuple[MoEDecodeConfig, MoEDecodeConfig] | None:
    """The configs of both products; None where one has none, or the weights are not MXFP4."""
    products = make_gemm_specs(problem)
    if products is None or products[0].weight_format != E2M1_FORMAT_CODE:
        return None
    if any(OUTPUT_TILE_ROWS * each.row_scale_bytes % 16 for each in products):
        return None
    top_k = problem.top_k
    first = select_config(products[0], top_k, sms, GATE_UP_SHARED_BYTES)
    if first is None:
        return None
    room = MAX_SHARED_BYTES - first.shared_bytes(products[0], top_k) - _BLOCK_RESERVED_BYTES
    second = select_config(products[1], top_k, sms, room)
    return None if second is None else (first, second)


def fits_kernel_limits(problem: MoEProblem) -> bool:
    """Whether the kernel can be compiled for these sizes; experts are all on this rank."""
    return (
        problem.device >= 0
        and problem.top_k <= MAX_TOP_K
        and problem.experts == problem.global_num_experts
        and select_config_pair(problem, launch.sm_count(problem.device)) is not None
    )


SUPPORTED_PROBLEMS = MoESupportRange(
    m=(1, 1),
    dtypes=(torch.bfloat16,),
    weight_dtype=torch.uint8,
    scale_dtypes=(torch.uint8,),
    offset=False,
    ungated=False,
    fits=fits_kernel_limits,
)


def run(inputs: FusedMoEInputs) -> torch.Tensor:
    """The weighted sum [1, H] over the token's experts, plus the shared expert's output."""
    problem, device = make_moe_problem(*inputs), inputs.x.get_device()
    products = make_gemm_specs(problem)
    configs = select_config_pair(problem, launch.sm_count(device))
    assert products is not None, "see fits_kernel_limits"
    assert configs is not None, "see fits_kernel_limits"
    x, top_k = inputs.x, problem.top_k
    with torch.cuda.device(x.device):
        inner = torch.empty(
            (top_k, problem.inner + X_PADDING_COLUMNS), dtype=x.dtype, device=x.device
        )
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for product, config, source, target in zip(
            products, configs, (x, inner), (inner, out), strict=True
        ):
            _launch_product(inputs, product, config, source, target)
    return out


def _launch_product(
    inputs: FusedMoEInputs,
    product: GroupedGemmSpec,
    config: MoEDecodeConfig,
    x: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One of both products."""
    name = "gate_up" if product.gated else "down"
    device, top_k = x.get_device(), inputs.topk_ids.shape[1]
    weight, scale, bias = (getattr(inputs, name + part) for part in ("", "_scale", "_bias"))
    shared = None if product.gated else inputs.shared
    macros = kernel_macros(
        product, config, top_k, gate_macro_value(inputs), shared=shared is not None
    )
    kernel = launch.compile_and_load_kernel(
        "moe_decode_mxfp4", "moe_decode_mxfp4", macros, config.threads,
        config.shared_bytes(product, top_k), device, _CARVEOUT_PERCENT,
    )  # fmt: skip
    pointers = launch.data_pointers(
        weight, scale, bias, x, shared, inputs.topk_weights, inputs.topk_ids, out
    )
    work = struct.pack("=8Q2f", *pointers, *(inputs.clamp or (0.0, 0.0)))
    blocks = min(launch.sm_count(device), num_output_tiles(product, top_k))
    kernel.launch(blocks, work, pdl=True)


@functools.lru_cache(1024)
def kernel_macros(
    product: GroupedGemmSpec, config: MoEDecodeConfig, top_k: int, gate: int, *, shared: bool
) -> tuple[str, ...]:
    """Macros of the kernel."""
    sizes = {
        "FORMAT": E2M1_FORMAT_CODE,
        "K": product.k,
        "N": product.n,
        "TOP_K": top_k,
        "GROUP": product.group,
        "GATED": product.gated,
        "OFFSET": False,
        "BIAS": product.bias,
        "SHARED": shared,
        "GATE": gate if product.gated else 0,
        "K_TILE": K_TILE,
        "WARPS": config.warps,
        "WAYS": config.ways,
        "TOKEN_TILES": 1,
        "ROW_TILES": 1,
        "RING": config.ring,
        "OUTPUT_TILES_PER_BLOCK": config.output_tiles_per_block,
    }
    return (
        *(f"{name}={int(size)}" for name, size in sizes.items()),
        *DTYPE_DEFINES[torch.bfloat16],
    )
