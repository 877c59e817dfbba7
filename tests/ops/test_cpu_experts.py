"""The CPU's experts: sizes and groups of any number of runs, threads, batches, distances, ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from modelmill.ops import fused_moe, mxfp4_linear, registry
from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.moe import int4_fused_moe, int8_fused_moe, mxfp4_fused_moe
from modelmill.ops.fused_moe import FusedMoEInputs, Shape
from modelmill.ops.int4_linear import random_weight
from modelmill.ops.quant_types import quantize_per_row
from tests.ops.test_cpu_kernels import isa as isa

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS: dict[str, Any] = {
    "int8_fused_moe": int8_fused_moe,
    "int4_fused_moe": int4_fused_moe,
    "mxfp4_fused_moe": mxfp4_fused_moe,
}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}

pytestmark = pytest.mark.skipif(
    build.unavailable_reason("cpu") is not None, reason=str(build.unavailable_reason("cpu"))
)


def int8_weight(n: int, k: int) -> dict[str, torch.Tensor | None]:
    """A seeded weight of int8 with a scale for each row."""
    wide = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * k**-0.5
    weight, scale = quantize_per_row(wide, torch.int8)
    return {"weight": weight, "scale": scale}


def operands(op: str, shape: Shape, dtype: torch.dtype, group: int = 64) -> FusedMoEInputs:
    """Seeded operands of an op; a group of 96 columns is symmetric."""
    if op == "int8_fused_moe":
        weights, group = fused_moe.make_expert_weight_args(shape, int8_weight), 0
        scales = {name: weights[name].view(shape[3], -1) for name in weights if "scale" in name}
        weights |= scales
    elif op == "mxfp4_fused_moe":
        group = mxfp4_linear.BLOCK_COLUMNS
        draw = partial(mxfp4_linear.random_weight, group=group, device="cpu", symmetric=True)
        weights = fused_moe.make_expert_weight_args(shape, draw)
    else:
        draw = partial(random_weight, group=group, device="cpu", symmetric=group == 96)
        weights = fused_moe.make_expert_weight_args(shape, draw)
    return FusedMoEInputs(**fused_moe.make_moe_case(shape, "cpu", dtype, weights, group).args)


def assert_is_reference(op: str, inputs: FusedMoEInputs) -> None:
    """The kernel serves these operands and gives the reference's values in float64."""
    assert KERNELS[op].supports(inputs)
    wide: list[Any] = [
        each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in inputs
    ]
    expected = registry.reference(op)(FusedMoEInputs(*wide))
    actual = KERNELS[op].run(inputs).double()
    error = ((actual - expected).abs() / expected.abs().clamp(min=1.0)).max()
    assert float(error) <= TOLERANCE[inputs.x.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_that_end_within_a_block_or_group(dtype: torch.dtype, isa: str) -> None:
    for hidden, inner in ((32, 32), (160, 96), (224, 352), (416, 128)):
        shape = (3, hidden, inner, 4, 2)
        for op in ("int8_fused_moe", "mxfp4_fused_moe"):
            assert_is_reference(op, operands(op, shape, dtype))
        for group in (32, 64, 96, 128, 256):
            inputs = operands("int4_fused_moe", shape, dtype, group)
            assert_is_reference("int4_fused_moe", inputs)


@pytest.mark.parametrize("op", KERNELS)
def test_experts_may_lie_apart(op: str) -> None:
    inputs = operands(op, (2, 96, 64, 4, 2), torch.bfloat16)
    names = ("gate_up", "gate_up_scale", "gate_up_offset", "down", "down_scale", "down_offset")
    spread: dict[str, Any] = {
        name: torch.stack((stack, stack), 1)[:, 0]
        for name in names
        if (stack := getattr(inputs, name)) is not None
    }
    apart = inputs._replace(**spread)
    assert not apart.down.is_contiguous()
    assert KERNELS[op].supports(apart)
    assert torch.equal(KERNELS[op].run(apart), KERNELS[op].run(inputs))


@pytest.mark.parametrize("op", KERNELS)
def test_the_bits_depend_neither_on_threads_nor_on_the_batch(op: str) -> None:
    inputs = operands(op, (7, 512, 256, 8, 3), torch.bfloat16)
    run, threads = KERNELS[op].run, torch.get_num_threads()
    whole = run(inputs)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(run(inputs), whole)
    finally:
        torch.set_num_threads(threads)
    for token in range(7):
        row: dict[str, Any] = {
            name: getattr(inputs, name)[token : token + 1]
            for name in ("x", "topk_weights", "topk_ids", "shared")
        }
        assert torch.equal(run(inputs._replace(**row))[0], whole[token])


@pytest.mark.parametrize("op", KERNELS)
def test_an_id_that_is_no_expert_adds_nothing(op: str) -> None:
    inputs = operands(op, (2, 64, 32, 4, 2), torch.float32)
    ids = torch.tensor([[1, 4], [-1, 1 << 30]], dtype=torch.int32)
    assert_is_reference(op, inputs._replace(topk_ids=ids))
    assert not KERNELS[op].run(inputs._replace(topk_ids=ids))[1].any()
    empty = inputs._replace(x=inputs.x[:0], topk_ids=ids[:0], topk_weights=inputs.topk_weights[:0])
    assert KERNELS[op].run(empty).shape == (0, 64)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_no_number_is_marked_alone(value: float, isa: str) -> None:
    for op in KERNELS:
        inputs = operands(op, (2, 160, 64, 4, 2), torch.bfloat16)
        inputs.x[0, 130] = value
        out = KERNELS[op].run(inputs)
        assert not out[0].isfinite().any()
        assert out[1].isfinite().all()


def test_other_operands_are_left_to_the_reference() -> None:
    for op, kernel in KERNELS.items():
        inputs = operands(op, (2, 64, 32, 4, 2), torch.bfloat16)
        scale = inputs.gate_up_scale
        assert kernel.supports(inputs)
        assert scale is not None
        refused: tuple[dict[str, Any], ...] = (
            {"x": inputs.x.double()},
            {"x": inputs.x[:, :40].contiguous()},
            {"topk_ids": inputs.topk_ids.long()},
            {"topk_ids": inputs.topk_ids.T.contiguous().T},
            {"activation": "gelu"},
            {"gate_up": inputs.gate_up.to(torch.int16)},
            {"gate_up": inputs.gate_up.transpose(1, 2).contiguous().transpose(1, 2)},
            {"gate_up_scale": scale.bfloat16()},
            {"gate_up_scale": None},
            {"down_offset": scale.bfloat16()},
            {"group": 48},
            {"shared": inputs.x.float()},
        )
        for change in refused:
            assert not kernel.supports(inputs._replace(**change)), change.keys()
