"""Cases at the size of prompts: the same makers with small sizes run through their references."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from modelmill.eval import large_op_cases
from modelmill.eval.op_cases import EXTRA_CASE_MAKERS, bench_cases
from modelmill.ops import groupwise, int4_linear, int8_group_linear, registry
from modelmill.ops.case import nbytes
from modelmill.ops.gated_rms_norm import NORM_PER_HEAD

LENGTHS = (9, 1)  # tokens of two sequences


def of_op(op: str, *shapes: tuple[Any, ...], **options: Any) -> large_op_cases.CaseMaker:
    """The op's own cases at these shapes."""
    return partial(import_module(f"modelmill.ops.{op}").cases_for_shapes, shapes, **options)


OF_ROWS = (
    "layer_norm", "add_layer_norm", "add_layer_norm_quant", "silu_mul", "silu_mul_quant", "gelu",
    "gelu_tanh", "gelu_quant", "shared_expert_gate", "sigmoid_mul", "relu2",
)  # fmt: skip
SMALL: dict[str, large_op_cases.CaseMaker] = {
    **{op: of_op(op, (3, 40)) for op in OF_ROWS},
    "causal_conv": of_op("causal_conv", (LENGTHS, 16, 4)),
    "gated_delta_rule": of_op("gated_delta_rule", (LENGTHS, 1, 2, 8, 8), chunk=8),
    "gated_rms_norm": of_op("gated_rms_norm", (3, 40, 8, NORM_PER_HEAD)),
    "head_projection": of_op("head_projection", (3, 40, 8)),
    "branches_add_rms_norm": of_op("branches_add_rms_norm", (3, 40, True, 1.0)),
    "ssd_scan": of_op("ssd_scan", (LENGTHS, 1, 2, 8, 8), chunk=8),
    "quantize": partial(large_op_cases.quantize_cases, 3, 64),
    "rope_cos_sin": partial(large_op_cases.rope_angle_cases, 7, 16),
    "rope_cache": partial(large_op_cases.rope_cases, 19, 2, 8),
    "int4_linear": partial(
        groupwise.cases_for_shapes, [(8, 96, 40, 32)], int4_linear.random_weight
    ),
    "int8_group_linear": partial(
        groupwise.cases_for_shapes, [(8, 96, 40, 32)], int8_group_linear.random_weight
    ),
    "rptq_quant": of_op("rptq_quant", (3, 96, 32), full=True),
    "rptq_linear": of_op("rptq_linear", (3, 96, 40, 32, 8)),
    "w8a8_linear_swiglu": of_op("w8a8_linear_swiglu", (3, 64, 48)),
}


def test_every_maker_is_tried_small() -> None:
    assert set(SMALL) == set(large_op_cases.LARGE_CASE_MAKERS)
    assert all(
        EXTRA_CASE_MAKERS["cuda"][op] is large_op_cases.LARGE_CASE_MAKERS[op] for op in SMALL
    ), "none is replaced by another of its name"


def tensors(values: Any) -> list[torch.Tensor]:
    each = values if isinstance(values, (tuple, list)) else [values]
    return [value for value in each if isinstance(value, torch.Tensor)]


LEFT_OUT = {"keys", "inv_scale", "zero_point", "perm", "step", "slots", "cos", "sin"}
"""Arguments that weigh nothing beside the rows, or are not read (keys of one row of frequencies).
"""


@pytest.mark.parametrize("op", SMALL)
def test_bytes_and_operations_are_counted(op: str) -> None:
    """Inputs read once, outputs written once: within what scales of rows and columns weigh, with
    wide rows.
    """
    wide: dict[str, large_op_cases.CaseMaker] = {
        "causal_conv": of_op("causal_conv", ((99, 1), 600, 4)),
        "gated_delta_rule": of_op("gated_delta_rule", ((99, 1), 1, 2, 64, 64), chunk=16),
        "gated_rms_norm": of_op("gated_rms_norm", (200, 2048, 128, NORM_PER_HEAD)),
        "ssd_scan": of_op("ssd_scan", ((99, 1), 1, 2, 64, 64), chunk=16),
        "head_projection": of_op("head_projection", (200, 2048, 64)),
        "branches_add_rms_norm": of_op("branches_add_rms_norm", (200, 2048, True, 1.0)),
        "quantize": partial(large_op_cases.quantize_cases, 200, 2048),
        "rope_cache": partial(large_op_cases.rope_cases, 19, 2, 64),
        "rope_cos_sin": partial(large_op_cases.rope_angle_cases, 700, 16),
        "rptq_quant": of_op("rptq_quant", (40, 4096, 32), full=True),
        "rptq_linear": of_op("rptq_linear", (40, 960, 400, 32, 8)),
        "w8a8_linear_swiglu": of_op("w8a8_linear_swiglu", (40, 640, 320)),
        "int4_linear": partial(
            groupwise.cases_for_shapes, [(8, 960, 400, 32)], int4_linear.random_weight
        ),
        "int8_group_linear": partial(
            groupwise.cases_for_shapes, [(8, 960, 400, 32)], int8_group_linear.random_weight
        ),
    }
    maker = large_op_cases.LARGE_CASE_MAKERS[op]
    make = wide.get(op) or partial(maker.func, [(200, 2048)])  # type: ignore[attr-defined]
    with torch.inference_mode():
        for case in make("cpu", torch.float16):
            out = registry.adapt_to_named_args(op, registry.reference(op))(**case.args)
            read = [
                each
                for name, value in case.args.items()
                if name not in LEFT_OUT
                for each in tensors(value)
            ]
            if op == "rope_cache":  # what is stored is as large as what is read of keys and values
                read, out = [case.args["qkv"]], case.args["qkv"]
            if "state" in case.args:  # that of each sequence is read and written
                rows = next(case.args[name] for name in ("x", "qkv", "xbc") if name in case.args)
                states = case.args["state"][: 2 * len(case.args["rows"].slots)]
                read = [rows, states]
            assert case.bytes_moved == pytest.approx(nbytes(*read, *tensors(out)), rel=0.02), (
                case.name
            )
            if op.endswith(("linear", "linear_swiglu", "projection")):
                x = case.args.get("x", case.args.get("q"))
                assert isinstance(x, torch.Tensor)
                columns = out.shape[1] * (2 if op.endswith("_swiglu") else 1)
                assert case.flops == 2 * x.numel() * columns
            else:
                assert case.flops == 0


def test_orders_are_timed_with_both_types() -> None:
    args_by_dtype = {
        case.name: case.args
        for case in large_op_cases.quantize_cases(3, 1024, "cpu", torch.float32)
    }
    orders = {
        (args["dtype"], "inv_scale" in args)
        for args in args_by_dtype.values()
        if "perm" in args and "zero_point" not in args
    }
    assert {(torch.int8, True), (torch.int8, False), (torch.float8_e4m3fn, False)} <= orders


def test_own_cases_and_these_have_names_of_their_own() -> None:
    for op, make in SMALL.items():
        own = {case.name for case in bench_cases(op, "cpu", torch.float32)}
        more = {case.name for case in make("cpu", torch.float32)}
        assert not own & more, op
