"""8-bit weights for 8-bit activations: storage, multiplication, errors for
damaged files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.core.errors import CorruptArtifact
from modelmill.ops import registry
from modelmill.ops.quant_types import QuantizedInput
from modelmill.weights import base, fp8, w8a8

FORMATS: dict[str, Any] = {"w8a8": w8a8.W8A8Weight, "fp8": fp8.Fp8Weight}
EXACT = {"w8a8": 1e-5, "fp8": 1e-4}


def random_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    weight_format=st.sampled_from(sorted(FORMATS)),
    size=st.tuples(st.integers(1, 12), st.integers(1, 200)),
    per_channel=st.booleans(),
    input_scale=st.sampled_from([0.0, -1.0, 0.03]),
)
def test_what_is_stored_is_what_is_multiplied(
    weight_format: str, size: tuple[int, int], per_channel: bool, input_scale: float
) -> None:
    weight = random_matrix(*size, seed=size[1])
    weight[0] = 0.0
    packed = FORMATS[weight_format].pack(
        weight, torch.float32, per_channel=per_channel, input_scale=input_scale
    )
    stored = packed.tensors()
    info = base.packed_tensor_specs(weight_format, size, torch.float32, per_channel=per_channel)
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == info
    assert list(stored) == list(info), "written in the order announced"
    step = (
        packed.scale[:, None] * 0.5
        if weight_format == "w8a8"
        else weight.abs() * 2.0**-4 + packed.scale[:, None] * 2.0**-9
    )
    assert bool(((packed.dequantize() - weight).abs() <= step * 1.0001).all())
    assert per_channel or len(set(packed.scale.tolist())) == 1
    again = base.from_tensors(weight_format, stored)
    x = random_matrix(3, size[1], seed=1)
    for ops in (
        registry.select_backends("cpu"),
        registry.select_backends(
            "cpu", dict.fromkeys(("quantize", f"{weight_format}_linear"), "torch")
        ),
    ):
        output = again.matmul(x, None, ops)
        torch.testing.assert_close(
            output,
            again.fake_quantize_input(x) @ again.dequantize().T,
            rtol=EXACT[weight_format],
            atol=EXACT[weight_format] * 10,
        )
    assert input_scale >= 0 or again.fake_quantize_input(x) is x
    assert (again.input_quant_spec is None) == (input_scale < 0)


@pytest.mark.parametrize("weight_format", sorted(FORMATS))
@pytest.mark.parametrize("static", [False, True])
def test_what_a_norm_has_rounded_is_taken_as_it_is(weight_format: str, static: bool) -> None:
    packed = FORMATS[weight_format].pack(
        random_matrix(9, 70), torch.float32, input_scale=0.02 if static else 0.0
    )
    ops, x, bias = (
        registry.select_backends("cpu"),
        random_matrix(4, 70, 1),
        random_matrix(1, 9, 2)[0],
    )
    act_quant = packed.input_quant_spec
    rounded = QuantizedInput(*ops.quantize(x, act_quant), x.dtype)
    assert (rounded.scale is None) == static
    assert torch.equal(packed.matmul(rounded, bias, ops), packed.matmul(x, bias, ops))


@pytest.mark.parametrize("weight_format", sorted(FORMATS))
def test_a_slice_is_the_slice_of_what_is_multiplied_with(weight_format: str) -> None:
    packed = FORMATS[weight_format].pack(random_matrix(20, 60), torch.float32, input_scale=0.05)
    part = packed.slice([(2, 5), (11, 20)], (7, 50))
    assert torch.equal(
        part.dequantize(),
        torch.cat([packed.dequantize()[2:5, 7:50], packed.dequantize()[11:20, 7:50]]),
    )
    assert part.input_scale is packed.input_scale
    assert torch.equal(
        base.from_tensors(weight_format, part.tensors()).dequantize(), part.dequantize()
    )


@pytest.mark.parametrize("weight_format", sorted(FORMATS))
def test_damage_is_named(weight_format: str) -> None:
    stored = FORMATS[weight_format].pack(random_matrix(4, 30), torch.float32).tensors()
    wrong = {"scale": torch.ones(5), "input_scale": torch.ones(2), "weight": torch.zeros(4, 30)}
    for name, tensor in wrong.items():
        with pytest.raises(CorruptArtifact, match="damaged"):
            base.from_tensors(weight_format, stored | {name: tensor})
    with pytest.raises(KeyError):
        base.from_tensors(weight_format, {n: t for n, t in stored.items() if n != "input_scale"})


def test_weights_of_nothing_stay_nothing() -> None:
    for weight_format in FORMATS.values():
        packed = weight_format.pack(torch.zeros(3, 8), torch.float32, per_channel=False)
        assert not packed.dequantize().any()
        assert replace(packed).scale.tolist() == [1.0] * 3
