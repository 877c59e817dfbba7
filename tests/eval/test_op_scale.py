"""Cases at the size of prompts: the same makers with small sizes run through their references."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from modelmill.eval import op_scale
from modelmill.eval.op_cases import MORE, cases
from modelmill.ops import (
    add_layer_norm_quant,
    cluster_quant,
    clustered_linear,
    gated8_linear,
    int4_linear,
    int8_group_linear,
    shelf,
)
from modelmill.ops.case import Case, nbytes

SMALL: dict[str, op_scale.Maker] = {
    "quantize": partial(op_scale.quantized, 3, 64),
    "layer_norm": partial(op_scale.layer_norms, 3, 40),
    "add_layer_norm": partial(op_scale.layer_norms, 3, 40, residual=True),
    "add_layer_norm_quant": partial(op_scale.layer_norms, 3, 40, residual=True, narrow=True),
    "rotation": partial(op_scale.angles, 7, 16),
    "rope_cache": partial(op_scale.rotated, 19, 2, 8),
    "silu_mul": partial(op_scale.gates, 3, 40),
    "silu_mul_quant": partial(op_scale.gates, 3, 40, narrow=True),
    "gelu": partial(op_scale.activations, 3, 40),
    "gelu_tanh": partial(op_scale.activations, 3, 40),
    "gelu_quant": partial(op_scale.activations, 3, 40, narrow=True),
    "int4_linear": partial(op_scale.grouped, [(8, 96, 40, 32)], int4_linear.drawn),
    "int8_group_linear": partial(op_scale.grouped, [(8, 96, 40, 32)], int8_group_linear.drawn),
    "cluster_quant": partial(cluster_quant.cases_of, [(3, 96, 32)]),
    "clustered_linear": partial(clustered_linear.cases_of, [(3, 96, 40, 32, 8)]),
    "gated8_linear": partial(gated8_linear.cases_of, [(3, 64, 48)]),
}


def test_every_maker_is_tried_small() -> None:
    assert set(SMALL) == set(op_scale.SCALE)
    assert set(op_scale.SCALE) <= set(MORE["cuda"])


@pytest.mark.parametrize("op", SMALL)
def test_cases_are_right_for_their_ops(op: str) -> None:
    small = list(SMALL[op]("cpu", torch.float32))
    assert len({case.name for case in small}) == len(small) > 0
    with torch.inference_mode():
        for case in small:
            shelf.reference(op)(**case.args)
            assert case.bytes_moved > 0


@pytest.mark.parametrize("op", ["gelu_quant", "silu_mul_quant", "add_layer_norm_quant", "quantize"])
def test_outputs_of_8_bits_count_a_byte_each(op: str) -> None:
    """A scale for each row or column is left out: next to nothing."""
    for case in SMALL[op]("cpu", torch.float16):
        found = shelf.reference(op)(**case.args)
        stored = [each for each in found if isinstance(each, torch.Tensor) and each.dim() == 2]
        read = [case.args[name] for name in ("x", "gate_up", "residual") if name in case.args]
        assert case.bytes_moved == nbytes(*read, *stored), case.name


def test_orders_are_timed_with_every_type() -> None:
    names = [name for name, _ in op_scale.ordered_forms(64, "cpu")]
    told: list[Case] = list(op_scale.quantized(3, 1024, "cpu", torch.float32))
    assert {f"3x1024-{name}" for name in names} <= {case.name for case in told}
    assert len({case.name for case in told}) == len(told)
    assert len(list(add_layer_norm_quant.forms("cpu"))) == 4


def test_own_cases_and_these_have_names_of_their_own() -> None:
    for op, make in SMALL.items():
        own = {case.name for case in cases(op, "cpu", torch.float32)}
        more = {case.name for case in make("cpu", torch.float32)}
        assert not own & more, op
