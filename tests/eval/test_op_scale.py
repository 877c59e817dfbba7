"""Cases at the size of prompts: the same makers with small sizes run through their references."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from modelmill.eval import op_scale
from modelmill.eval.op_cases import MORE, cases
from modelmill.ops import (
    add_layer_norm,
    add_layer_norm_quant,
    cluster_quant,
    clustered_linear,
    gated8_linear,
    gelu,
    gelu_quant,
    gelu_tanh,
    int4_linear,
    int8_group_linear,
    layer_norm,
    shelf,
    silu_mul,
    silu_mul_quant,
)
from modelmill.ops.case import nbytes

SMALL: dict[str, op_scale.Maker] = {
    "quantize": partial(op_scale.quantized, 3, 64),
    "layer_norm": partial(layer_norm.cases_of, [(3, 40)]),
    "add_layer_norm": partial(add_layer_norm.cases_of, [(3, 40)]),
    "add_layer_norm_quant": partial(add_layer_norm_quant.cases_of, [(3, 40)]),
    "rotation": partial(op_scale.angles, 7, 16),
    "rope_cache": partial(op_scale.rotated, 19, 2, 8),
    "silu_mul": partial(silu_mul.cases_of, [(3, 40)]),
    "silu_mul_quant": partial(silu_mul_quant.cases_of, [(3, 40)]),
    "gelu": partial(gelu.cases_of, [(3, 40)]),
    "gelu_tanh": partial(gelu_tanh.cases_of, [(3, 40)]),
    "gelu_quant": partial(gelu_quant.cases_of, [(3, 40)]),
    "int4_linear": partial(op_scale.grouped, [(8, 96, 40, 32)], int4_linear.drawn),
    "int8_group_linear": partial(op_scale.grouped, [(8, 96, 40, 32)], int8_group_linear.drawn),
    "cluster_quant": partial(cluster_quant.cases_of, [(3, 96, 32)], full=True),
    "clustered_linear": partial(clustered_linear.cases_of, [(3, 96, 40, 32, 8)]),
    "gated8_linear": partial(gated8_linear.cases_of, [(3, 64, 48)]),
}


def test_every_maker_is_tried_small() -> None:
    assert set(SMALL) == set(op_scale.SCALE)
    assert all(MORE["cuda"][op] is op_scale.SCALE[op] for op in SMALL), "none is replaced by another of its name"


def tensors(values: Any) -> list[torch.Tensor]:
    each = values if isinstance(values, (tuple, list)) else [values]
    return [value for value in each if isinstance(value, torch.Tensor)]


LEFT_OUT = {"keys", "factor", "zero", "order", "step", "slots", "cos", "sin"}
"""Arguments that weigh nothing beside the rows, or are not read (keys of one row of frequencies)."""


@pytest.mark.parametrize("op", SMALL)
def test_bytes_and_operations_are_counted(op: str) -> None:
    """Inputs read once, outputs written once: within what scales of rows and columns weigh, with wide rows."""
    wide: dict[str, op_scale.Maker] = {
        "quantize": partial(op_scale.quantized, 200, 2048),
        "rope_cache": partial(op_scale.rotated, 19, 2, 64),
        "rotation": partial(op_scale.angles, 700, 16),
        "cluster_quant": partial(cluster_quant.cases_of, [(40, 4096, 32)], full=True),
        "clustered_linear": partial(clustered_linear.cases_of, [(40, 960, 400, 32, 8)]),
        "gated8_linear": partial(gated8_linear.cases_of, [(40, 640, 320)]),
        "int4_linear": partial(op_scale.grouped, [(8, 960, 400, 32)], int4_linear.drawn),
        "int8_group_linear": partial(op_scale.grouped, [(8, 960, 400, 32)], int8_group_linear.drawn),
    }
    maker = op_scale.SCALE[op]
    make = wide.get(op) or partial(maker.func, [(200, 2048)])  # type: ignore[attr-defined]
    with torch.inference_mode():
        for case in make("cpu", torch.float16):
            out = shelf.reference(op)(**case.args)
            read = [each for name, value in case.args.items() if name not in LEFT_OUT for each in tensors(value)]
            if op == "rope_cache":  # what is stored is as large as what is read of keys and values
                read, out = [case.args["qkv"]], case.args["qkv"]
            assert case.bytes_moved == pytest.approx(nbytes(*read, *tensors(out)), rel=0.02), case.name
            if op.endswith("linear"):
                x = case.args.get("x", case.args.get("q"))
                assert isinstance(x, torch.Tensor)
                columns = out.shape[1] * (2 if op.startswith("gated") else 1)
                assert case.flops == 2 * x.numel() * columns
            else:
                assert case.flops == 0


def test_orders_are_timed_with_both_types() -> None:
    told = {case.name: case.args for case in op_scale.quantized(3, 1024, "cpu", torch.float32)}
    orders = {(args["kind"], "factor" in args) for args in told.values() if "order" in args and "zero" not in args}
    assert {(torch.int8, True), (torch.int8, False), (torch.float8_e4m3fn, False)} <= orders


def test_own_cases_and_these_have_names_of_their_own() -> None:
    for op, make in SMALL.items():
        own = {case.name for case in cases(op, "cpu", torch.float32)}
        more = {case.name for case in make("cpu", torch.float32)}
        assert not own & more, op
