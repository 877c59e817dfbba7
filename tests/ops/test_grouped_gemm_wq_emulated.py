"""grouped_gemm_wq.cu, moe_align.cu and moe_combine.cu on a CPU, as their Python launches them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from modelmill.ops.cuda.moe import grouped_gemm_wq, moe_align_block_size
from modelmill.ops.fused_moe import FusedMoEInputs, Shape
from modelmill.ops.moe_align_block_size import NO_EXPERT
from modelmill.ops.moe_align_block_size import moe_align_block_size as aligned
from modelmill.ops.moe_support import make_moe_problem
from tests.ops.emulation.cases import mistakes, slow_cases
from tests.ops.emulation.emulator import Emulator, requires_emulation
from tests.ops.moe_draws import INT4, INT8, MXFP4, moe_error, random_moe_inputs

pytestmark = requires_emulation
BF, HF = torch.bfloat16, torch.float16
LIMIT = {BF: 6e-3, HF: 1e-3}  # of the whole, in the norm: what is between the products is rounded


@pytest.fixture(autouse=True)
def many_stages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small stages and few blocks: each block goes on to other experts, and around its ring."""
    caches = (grouped_gemm_wq.select_config, grouped_gemm_wq.select_config_pair)
    changes = {
        "MAX_STAGE_BYTES": 2 << 10,
        "MAX_STAGES": 3,
        "BLOCKS_PER_SM": (1,),
        "L2_REUSE_STAGES": 2,
    }
    for name, value in changes.items():
        monkeypatch.setattr(grouped_gemm_wq, name, value)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def written_in_front(
    emulator: Emulator, inputs: FusedMoEInputs, name: str, arguments: tuple[bytes, ...]
) -> list[tuple[int, int]]:
    """What the kernel in front of a launch writes: (address, bytes)."""
    configs = grouped_gemm_wq.select_config_pair(make_moe_problem(*inputs))
    assert configs is not None
    pairs, columns = inputs.topk_ids.numel(), inputs.x.shape[1]
    first = struct.unpack_from("=Q", arguments[0])[0]
    if name == "moe_align":
        return [(first, 4 * pairs)]
    if name == "moe_combine":
        return [(first, 2 * pairs * columns)]
    *_, x, _, sorted_ids, expert_ids, _, blocks = struct.unpack_from("=8Q2i", arguments[0])
    positions = 8 * configs[0].token_tiles * blocks
    if [each for each, _ in emulator.launched].count(name) == 1:
        return [(sorted_ids, 4 * positions), (expert_ids, 4 * blocks)]
    return [(x, positions * inputs.gate_up.shape[1])]


def error(
    emulator: Emulator, op: str, shape: Shape, dtype: torch.dtype, group: int, kind: str
) -> float:
    """Of the op, in the norm; what the kernel in front writes is rubbish until it is waited for."""
    inputs = random_moe_inputs(op, shape, dtype, group, kind)
    emulator.launched.clear()
    emulator.preceding_writes = partial(written_in_front, emulator, inputs)
    return moe_error(grouped_gemm_wq.run, op, inputs)


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "group", "kind"),
    [
        (INT4, (5, 128, 64, 4, 3), BF, 64, "shared"),
        *slow_cases(
            (INT4, (5, 64, 32, 4, 3), BF, 32, "plain"),
            (INT4, (5, 64, 32, 4, 3), BF, 32, "elsewhere"),
            (INT4, (5, 64, 32, 20, 16), BF, 32, "shared"),
            (MXFP4, (4, 64, 32, 1, 1), BF, 32, "clamped"),
            (MXFP4, (4, 64, 64, 3, 2), BF, 32, "clamped"),
            (INT8, (3, 64, 64, 4, 2), HF, 0, "shared"),
            (INT4, (2, 256, 128, 8, 2), HF, 128, "gelu"),
            (INT4, (21, 384, 64, 3, 2), BF, 64, "local"),
            (INT4, (40, 256, 128, 2, 2), BF, 128, "shared"),
            (INT4, (70, 128, 128, 3, 2), BF, 128, "shared"),
            (MXFP4, (30, 192, 128, 3, 3), BF, 32, "gelu"),
            (MXFP4, (9, 320, 64, 6, 2), BF, 32, "local"),
            (MXFP4, (9, 512, 256, 3, 2), BF, 32, "clamped"),
            (INT8, (33, 192, 64, 3, 2), BF, 0, "clamped"),
            (INT8, (2, 96, 160, 5, 4), BF, 0, "local"),
        ),
    ],
)
def test_experts(
    emulator: Emulator, op: str, shape: Shape, dtype: torch.dtype, group: int, kind: str
) -> None:
    assert error(emulator, op, shape, dtype, group, kind) < LIMIT[dtype]
    names = [name for name, _ in emulator.launched]
    assert names == ["moe_align", "grouped_gemm_wq", "grouped_gemm_wq", "moe_combine"]


WAIT_FOR_STAGE = "mbarrier_wait(shared_address(&exchange.full[state.stage])"
WAIT_FOR_LAG = "wait_for(REFILL_LAG ? exchange.added : exchange.ready"
CHANGES = {
    "gate and up do not wait": "if (GATED) pdl_wait();",
    "down does not wait": "if (!GATED) pdl_wait();",
    "a stage is not waited for": (f"{WAIT_FOR_STAGE}, state.parity);", ""),
    "sums of x": ("low_base * sum.y", "low_base * sum.x"),
    "a stage too early": (f"{WAIT_FOR_LAG}, done - REFILL_LAG);", ""),
    "sums before they are there": "wait_for(exchange.ready, done);\n",
    "a buffer in use": "if (done > 1) wait_for(exchange.added, done - 2);",
    "rows of two experts": ("if (at.block != block) {", "if (block < 0) {"),
    "halves of a quad's rows": ("swapped = quad % 2", "swapped = false"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", mistakes(CHANGES))
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    case = (MXFP4, (9, 512, 256, 3, 2), BF, 32, "clamped")
    if "low_base" in change[0]:
        case = (INT4, (9, 128, 128, 3, 2), BF, 64, "shared")
    assert emulator.detects(change, lambda: error(emulator, *case) < LIMIT[BF])


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block"),
    [(7, 2, 4, 4), *slow_cases((1, 1, 1, 8), (300, 4, 5, 16), (40, 1, 300, 8), (1030, 2, 33, 32))],
)
def test_pairs_are_sorted_as_the_reference_does(
    emulator: Emulator, tokens: int, top_k: int, experts: int, block: int
) -> None:
    draw = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=draw) + torch.linspace(0, 0.5, experts)
    ids = scores.topk(top_k, dim=-1).indices.int()
    ids[ids == experts // 2] = NO_EXPERT
    order, owners = moe_align_block_size.run(ids, block, experts)
    expected_order, expected_owners = aligned(ids, block, experts)
    assert torch.equal(order, expected_order)
    assert torch.equal(owners, expected_owners)
    assert emulator.launched == [("moe_align", 1)]
