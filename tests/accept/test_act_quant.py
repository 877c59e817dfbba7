"""Engines with rounded activations: honest ones are accepted, planted faults refused and named, as
in wide ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from modelmill.ops import registry
from modelmill.ops import w8a8_linear as op
from modelmill.quant import activation_smoothing
from tests.accept.build_and_accept import FAMILIES, build_and_accept
from tests.accept.planted_faults import FAULTS, check_fault_is_named

SMALL = {"calibration_samples": 4, "calibration_length": 64}
FIXED = SMALL | {"alpha": "0.5"}
STATIC = {"activation_scales": "tensor", "weight_scales": "tensor"}


def _honest_settings(name: str) -> list[tuple[str, str, dict[str, Any]]]:
    settings: list[tuple[str, str, dict[str, Any]]] = [
        ("bfloat16", "fp8", SMALL),
        ("bfloat16", "smoothquant", FIXED),
    ]
    if name in ("llama", "gpt2"):
        settings += [("float32", "smoothquant", SMALL), ("float16", "smoothquant", FIXED | STATIC)]
        settings += [
            ("float32", "fp8", SMALL | STATIC),
            ("float16", "fp8", SMALL | {"activation_scales": "none"}),
        ]
    if name == "llama-tied":
        settings += [("bfloat16", "smoothquant", FIXED | {"quantize_head": True})]
    return settings


@pytest.mark.parametrize(
    ("name", "dtype", "recipe", "options"),
    [
        pytest.param(name, *setting, id=f"{name}-{number}")
        for name in FAMILIES
        for number, setting in enumerate(_honest_settings(name))
    ],
)
def test_a_faultless_engine_is_accepted(
    name: str,
    dtype: str,
    recipe: str,
    options: dict[str, Any],
    tiny: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    report, written = build_and_accept(tiny[name], tmp_path / "e", dtype, recipe, **options)
    assert written, report["reason"]


@pytest.mark.parametrize(("family", "name"), FAULTS)
def test_a_fault_is_refused_and_named(
    family: str, name: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    settings: list[tuple[str, str, dict[str, Any]]] = [("bfloat16", "fp8", SMALL)]
    if name in ("o_proj x 1.05", "k renamed v", "the two norms renamed"):
        settings += [("float32", "smoothquant", FIXED)]
    for setting in settings:
        check_fault_is_named(family, name, tiny[family], tmp_path / "e", setting)


def test_a_smoother_folded_on_one_side_is_refused(tiny: Mapping[str, Path], tmp_path: Path) -> None:
    """The v rows are divided, the columns of o are left alone."""
    real_fold = activation_smoothing.fold_scales

    def half(block: Any, site: str, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weight = block.linear_by_path("attn.o_proj").weight
        result = real_fold(block, site, scales, dtype)
        if site == "o":
            block.linear_by_path("attn.o_proj").weight = weight
        return result

    with mock.patch.object(activation_smoothing, "fold_scales", half):
        report, written = build_and_accept(
            tiny["llama"], tmp_path / "e", "float32", "smoothquant", **FIXED
        )
    assert not written
    assert (report["layer"], report["module"]) == (0, "attn.o_proj"), report["reason"]


@pytest.mark.parametrize("wrong", ["a scale", "a sum that saturates"])
def test_a_kernel_that_errs_is_refused(
    wrong: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    real_linear, real = op.w8a8_linear, registry.select_backends

    def run(inputs: Any) -> Any:
        x, weight, scale, x_scale, dtype, _ = inputs
        if wrong == "a scale":
            return real_linear(inputs._replace(x_scale=x_scale * 1.003))
        total = (x.double() @ weight.double().T).clamp(-(2**15), 2**15 - 1)
        return (total.float() * x_scale[:, None] * scale).to(dtype)

    def resolve(device: str, *more: Any) -> Any:
        return real(device, *more).replace({"w8a8_linear": run})

    with mock.patch("modelmill.runtime.engine_core.select_backends", resolve):
        report, written = build_and_accept(
            tiny["llama"], tmp_path / "e", "float32", "smoothquant", **FIXED
        )
    assert not written
    assert report["module"].endswith("_proj"), report["reason"]


def test_the_report_tells_what_smoothing_did(tiny: Mapping[str, Path], tmp_path: Path) -> None:
    report, written = build_and_accept(
        tiny["gpt2"], tmp_path / "e", "float32", "smoothquant", **SMALL
    )
    assert written, report["reason"]
    errors = report["quantization_errors"]
    required_keys = {
        "layer",
        "module",
        "before",
        "after",
        "bits",
        "outliers",
        "alpha",
        "layer_error",
        "activations",
    }
    assert all(required_keys <= set(each) for each in errors)
    notes = {each["module"] for each in errors if "note" in each}
    assert notes == {"mlp.down_proj"}, "GPT-2's second matrix cannot be smoothed, and that is said"
    assert all(each["layer_error"] <= each["layer_error_unsmoothed"] for each in errors)
    assert report["logits"]["mean_kl"] > 0
    assert 0 < report["logits"]["agreement"] <= 1
