"""moe_decode_mxfp4.cu on a CPU, as its Python launches it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from modelmill.ops.cuda.moe import moe_decode_mxfp4
from modelmill.ops.fused_moe import FusedMoEInputs, Shape
from tests.ops.emulation.cases import mistakes, slow_cases
from tests.ops.emulation.emulator import Emulator, memory_ranges, requires_emulation
from tests.ops.moe_draws import MXFP4, moe_error, random_moe_inputs

pytestmark = requires_emulation
LIMIT = 6e-3  # of the whole, in the norm: what is between the products is rounded
POINTERS = "=8Q"  # weight, scale, bias, x, shared, topk_weights, topk_ids, out
SMALL_ROOM = 24 << 10
"""Of shared memory: few stages, so that a block goes around its rings."""


def clear_caches() -> None:
    moe_decode_mxfp4.select_config.cache_clear()
    moe_decode_mxfp4.select_config_pair.cache_clear()


@pytest.fixture(autouse=True)
def no_cached_config() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()


def use_room(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a block of the first product so much shared memory, one of the second twice that."""
    monkeypatch.setattr(moe_decode_mxfp4, "GATE_UP_SHARED_BYTES", room)
    monkeypatch.setattr(moe_decode_mxfp4, "MAX_SHARED_BYTES", 2 * room)
    clear_caches()


def written_in_front(
    inputs: FusedMoEInputs, name: str, arguments: tuple[bytes, ...]
) -> list[tuple[int, int]]:
    """What the kernel in front of a launch writes: (address, bytes)."""
    assert name == "moe_decode_mxfp4"
    pointers = struct.unpack_from(POINTERS, arguments[0])
    if pointers[0] == inputs.gate_up.data_ptr():  # behind the router and whatever makes x
        return memory_ranges(inputs.x, inputs.topk_ids)
    row = 2 * (inputs.inner_size + moe_decode_mxfp4.X_PADDING_COLUMNS)
    return [(pointers[3], inputs.topk_ids.numel() * row)]


def error(emulator: Emulator, shape: Shape, kind: str) -> float:
    """Of the op; what the kernel in front writes is rubbish until it is waited for."""
    inputs = random_moe_inputs(MXFP4, shape, torch.bfloat16, 32, kind)
    inputs = inputs._replace(x=inputs.x.contiguous())
    emulator.launched.clear()
    emulator.preceding_writes = partial(written_in_front, inputs)
    return moe_error(moe_decode_mxfp4.run, MXFP4, inputs)


@pytest.mark.parametrize(
    ("shape", "kind", "num_sms"),
    [
        ((1, 256, 128, 5, 3), "clamped", 4),
        *slow_cases(
            ((1, 512, 256, 4, 2), "gelu", 5),
            ((1, 512, 512, 9, 8), "shared", 9),
            ((1, 320, 128, 3, 1), "plain", 5),
            ((1, 128, 64, 20, 16), "gelu", 9),
            ((1, 192, 320, 6, 5), "shared", 40),
        ),
    ],
)
def test_experts(
    emulator: Emulator,
    shape: Shape,
    kind: str,
    num_sms: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulator.num_sms = num_sms
    for room in (moe_decode_mxfp4.GATE_UP_SHARED_BYTES, SMALL_ROOM):
        use_room(room, monkeypatch)
        assert error(emulator, shape, kind) < LIMIT
        assert [name for name, _ in emulator.launched] == ["moe_decode_mxfp4"] * 2


MANY_PARTS = (1, 128, 256, 20, 15)
"""Pairs of experts, of which a team has several, and the last is one alone."""
WAIT = "mbarrier_wait(shared_address(&exchange."
CHANGES = {
    "gate and up do not wait": "if (GATED) pdl_wait();",
    "down does not wait": "if (!GATED) pdl_wait();",
    "a stage is not waited for": WAIT + "stages.full[at.slot()]), at.parity());",
    "a stage too early": ("at.parity() ^ 1);", "at.parity());"),
    "x of down is not waited for": WAIT + "x_full[part]), 0);",
    "x of another expert": ("(both ? quad % 2 : 0)", "0"),
    "weights of two experts in the other order": ("first_weight * sum.x", "second_weight * sum.x"),
    "an expert that is not there": ("(both ? second_weight * sum.y : 0.0f)", "sum.y"),
    "sums of the part before": ("part == team ? both_sums : total + both_sums", "both_sums"),
    "halves of a quad's rows": ("quad % 2 ? sum[2] : sum[0]", "sum[0]"),
    "scale of the other row": ("(stage, high_row, tile)", "(stage, low_row, tile)"),
    "columns of x": ("2 * odd + four % 8 / 4", "odd + four % 8 / 4 * 2"),
    "a bias of another expert": ("w.ids[unit / UNITS_PER_MATRIX]", "w.ids[0]"),
    "bytes of an expert that is not there": ("halves * HALF_BYTES", "2 * HALF_BYTES"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", mistakes(CHANGES))
def test_the_emulation_sees_mistakes(
    emulator: Emulator, change: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator.num_sms = 8
    use_room(SMALL_ROOM, monkeypatch)
    assert emulator.detects(change, lambda: error(emulator, MANY_PARTS, "clamped") < LIMIT)
