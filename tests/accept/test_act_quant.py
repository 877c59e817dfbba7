"""Engines with rounded activations: honest ones are accepted, planted faults refused and named, as
in wide ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from modelmill.ops import registry
from modelmill.ops import w8a8_linear as op
from modelmill.quant import activation_smoothing
from tests.accept.build_and_accept import build_and_accept, save_tiny
from tests.accept.planted_faults import faults, plant_fault

SMALL = {"calibration_samples": 4, "calibration_length": 64}
FIXED = SMALL | {"alpha": "0.5"}
STATIC = {"activation_scales": "tensor", "weight_scales": "tensor"}
CASES = [(family, fault.name) for family in ("llama", "gpt2", "qwen") for fault in faults(family)]
HONEST = ("gpt2", "llama", "llama-bias", "llama-mqa", "llama-tied", "qwen", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: save_tiny(name, root / name) for name in HONEST}


@pytest.mark.parametrize("name", HONEST)
def test_a_faultless_engine_is_accepted(name: str, tiny: dict[str, Path], tmp_path: Path) -> None:
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
    for number, (dtype, recipe, options) in enumerate(settings):
        report, written = build_and_accept(
            tiny[name], tmp_path / str(number), dtype, recipe, **options
        )
        assert written, f"{dtype} {recipe} {options}: {report['reason']}"


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_fault_is_refused_and_named(
    family: str, name: str, tiny: dict[str, Path], tmp_path: Path
) -> None:
    fault = next(f for f in faults(family) if f.name == name)
    settings: list[tuple[str, str, dict[str, Any]]] = [("bfloat16", "fp8", SMALL)]
    if name in ("o_proj x 1.05", "k renamed v", "the two norms renamed"):
        settings += [("float32", "smoothquant", FIXED)]
    for dtype, recipe, options in settings:
        with plant_fault(fault, family):
            report, written = build_and_accept(
                tiny[family], tmp_path / "e", dtype, recipe, **options
            )
        assert not written, f"{dtype} {recipe}"
        assert (report["layer"], report["module"] in fault.modules) == (fault.layer, True), report[
            "reason"
        ]


def test_a_smoother_folded_on_one_side_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    """The v rows are divided, the columns of o are left alone."""
    real_fold = activation_smoothing.fold_scales

    def half(block: Any, site: str, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weight = block.linear(site).weight
        result = real_fold(block, site, scales, dtype)
        if site == "o":
            block.linear(site).weight = weight
        return result

    with mock.patch.object(activation_smoothing, "fold_scales", half):
        report, written = build_and_accept(
            tiny["llama"], tmp_path / "e", "float32", "smoothquant", **FIXED
        )
    assert not written
    assert (report["layer"], report["module"]) == (0, "attn.o_proj"), report["reason"]


@pytest.mark.parametrize("wrong", ["a scale", "a sum that saturates"])
def test_a_kernel_that_errs_is_refused(wrong: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    real_linear, real = op.w8a8_linear, registry.select_backends

    def run(
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        x_scale: torch.Tensor,
        *more: Any,
    ) -> Any:
        if wrong == "a scale":
            return real_linear(x, weight, scale, x_scale * 1.003, *more)
        total = (x.double() @ weight.double().T).clamp(-(2**15), 2**15 - 1)
        return (total.float() * x_scale[:, None] * scale).to(more[0])

    def resolve(device: str, *more: Any) -> Any:
        return real(device, *more).replace({"w8a8_linear": run})

    with mock.patch("modelmill.runtime.engine_core.select_backends", resolve):
        report, written = build_and_accept(
            tiny["llama"], tmp_path / "e", "float32", "smoothquant", **FIXED
        )
    assert not written
    assert report["module"].endswith("_proj"), report["reason"]


def test_the_report_tells_what_smoothing_did(tiny: dict[str, Path], tmp_path: Path) -> None:
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
