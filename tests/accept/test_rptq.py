"""Engines of clustered integers: honest ones are accepted, wrong clusters are refused and named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelmill.quant import calibrate
from modelmill.weights.rptq import RptqWeight
from tests.accept.build_and_accept import build_and_accept

SMALL = {"calibration_samples": 4, "calibration_length": 64}
FAMILIES = ("gpt2", "llama", "llama-bias")


@pytest.mark.parametrize(("name", "dtype"), [("llama-bias", "float32"), ("gpt2", "bfloat16")])
def test_a_faultless_engine_is_accepted(
    name: str, dtype: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    report, written = build_and_accept(tiny[name], tmp_path / "e", dtype, "rptq", **SMALL)
    assert written, report["reason"]


@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32")])
def test_so_is_one_of_four_bits(
    name: str, dtype: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    report, written = build_and_accept(
        tiny[name], tmp_path / name, dtype, "rptq", bits="w4a4", **SMALL
    )
    assert written, report["reason"]


@pytest.mark.parametrize(
    ("name", "dtype", "bits"), [("llama", "bfloat16", "w8a8"), ("gpt2", "float32", "w4a4")]
)
def test_so_is_one_whose_heavy_inputs_have_several_columns(
    name: str, dtype: str, bits: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    report, written = build_and_accept(
        tiny[name], tmp_path / name, dtype, "rptq", bits=bits, splits_per_channel=3, **SMALL
    )
    assert written, report["reason"]


def _order(weight: RptqWeight) -> RptqWeight:
    return replace(weight, perm=weight.perm.roll(1))


def _zero(weight: RptqWeight) -> RptqWeight:
    assert weight.input_zero_points is not None
    return replace(weight, input_zero_points=weight.input_zero_points + 3)


def _step(weight: RptqWeight) -> RptqWeight:
    assert weight.input_scales is not None
    return replace(weight, input_scales=weight.input_scales.roll(1))


@pytest.mark.parametrize("fault", [_order, _zero, _step], ids=lambda f: f.__name__)
def test_wrong_clusters_are_refused(
    fault: Any, tiny: Mapping[str, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    """The permutation, a zero-point or a cluster's step, wrong in the middle layer."""
    real = calibrate.quantize_layer

    def wrong(block: Any, *rest: Any, layer_name: str, **more: Any) -> Any:
        out = real(block, *rest, layer_name=layer_name, **more)
        if layer_name == "layers.1":
            linear = block.linear_by_path("mlp.gate_up_proj")
            linear.weight = fault(linear.weight)
        return out

    monkeypatch.setattr("modelmill.builder.layer_quantizer.quantize_layer", wrong)
    report, written = build_and_accept(tiny["llama"], tmp_path / "e", "float32", "rptq", **SMALL)
    assert not written
    assert report["layer"] == 1
    assert report["module"].startswith(("mlp.gate", "mlp.up"))
