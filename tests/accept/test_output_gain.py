"""Fitted scales shrink honest matrices, which their outputs show; a matrix x 0.95 or x 1.05 is
refused in every recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelmill.accept.error_metrics import MAX_GAIN_DEVIATION_SIGMAS, ErrorMetrics
from modelmill.accept.output_gain import measure_quantized_output_gain
from modelmill.accept.row_and_tile_errors import compare_matrix
from modelmill.accept.tolerances import weight_bound
from modelmill.core.config import BuildConfig
from modelmill.quant.recipe import InputStatistics
from modelmill.quant.rptq import RptqRecipe
from tests.accept.build_and_accept import build_and_accept
from tests.accept.planted_faults import change_tensor
from tests.models import tiny_models

SMALL = {"calibration_samples": 2, "calibration_length": 64}
RPTQ_W4A8 = ("rptq", {"bits": "w4a8", "splits_per_channel": 2})
RECIPES: list[tuple[str, dict[str, Any]]] = [
    RPTQ_W4A8,
    ("rptq", {"bits": "w8a8"}),
    ("rptq", {"bits": "w4a4"}),
    *(
        ("int4", {"method": method, "group_size": 32})
        for method in ("nearest", "gptq", "awq", "awq+gptq")
    ),
    ("int4", {"method": "nearest", "symmetric": True}),
    ("int4", {"method": "gptq", "symmetric": True}),
    ("smoothquant", {}),
    ("fp8", {}),
    ("fp8", {"method": "nearest"}),
    ("int8", {}),
]
FACTORS = (0.95, 1.05)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(weight: Tensor) -> Tensor:
    """The values rounded to 15 levels, one scale a row."""
    scale = weight.abs().amax(1, keepdim=True) / 7
    return (weight / scale).round() * scale


def test_a_factor_is_the_gain_without_any_chance() -> None:
    weight, x = normal(24, 32, seed=1), normal(50, 32, seed=2)
    for factor in FACTORS:
        outputs = measure_quantized_output_gain(factor * weight, weight, [x[:20], x[20:]])
        assert outputs.gain == pytest.approx(factor, rel=1e-6)
        assert outputs.std < 1e-6


def test_it_is_the_formula_where_tokens_are_equally_loud() -> None:
    weight, x = normal(24, 32, seed=1), normal(50, 32, seed=2)
    x = x / (x @ weight.T).norm(dim=1, keepdim=True)
    exact, product = (x.double() @ each.double().T for each in (weight, rounded(weight)))
    expected = float((exact * product).sum() / exact.square().sum())
    assert measure_quantized_output_gain(rounded(weight), weight, [x]).gain == pytest.approx(
        expected
    )


def test_neither_a_loud_token_nor_one_that_cancels_decides() -> None:
    """Both are rounded badly, of 64 tokens."""
    weight, x = normal(48, 32, seed=1), normal(64, 32, seed=2)
    direction = torch.eye(32)[0]
    x[:, 0] = 0
    for size, token in ((1.0, 500 * direction), (1e-4, direction)):
        weight[:, 0] = size * normal(48, seed=3)
        error = 0.5 * normal(48, seed=3)  # 0.5 of the loud output, 5,000 times that which cancels
        actual = weight + error[:, None] * direction
        x[0] = token
        assert measure_quantized_output_gain(actual, weight, [x]).gain == pytest.approx(1, abs=0.01)
        exact, product = x @ weight.T, x @ actual.T
        power = exact.square().sum(1)
        along = (exact * product).sum(1)
        plain = float(along.sum() / power.sum()) if size == 1.0 else float((along / power).mean())
        assert plain > 1.4


@pytest.mark.parametrize("shared_by", ["tokens", "rows", "neither"])
def test_gains_stray_as_far_as_is_foreseen(shared_by: str) -> None:
    """Errors are shared by tokens of one direction, and by rows that are multiples of one."""
    off, stds = [], []
    for seed in range(100):
        weight, x = normal(24, 40, seed=seed), normal(30, 40, seed=seed + 1000)
        if shared_by == "tokens":
            x = x[:, :1] * normal(1, 40, seed=seed + 2000)
        if shared_by == "rows":
            weight = weight[:, :1] * normal(1, 40, seed=seed + 2000)
        outputs = measure_quantized_output_gain(rounded(weight), weight, [x])
        off.append(abs(outputs.gain - 1))
        stds.append(outputs.std)
    spread, std = (torch.tensor(each).square().mean().sqrt() for each in (off, stds))
    assert 0.5 < float(std / spread) < 3
    assert all(a <= MAX_GAIN_DEVIATION_SIGMAS * b for a, b in zip(off, stds, strict=True))


def test_nothing_is_said_of_one_row_no_tokens_and_no_outputs() -> None:
    weight, x = normal(24, 32, seed=1), normal(50, 32, seed=2)
    for actual, inputs in (
        (weight[:1], [x]), (weight, []), (weight, [x[:0]]), (weight, [x[:1]]), (weight, [x[:, 1:]]),
        (weight, [0 * x]),
    ):  # fmt: skip
        outputs = measure_quantized_output_gain(2 * actual, actual, inputs)
        assert outputs == (1.0, float("inf"))


def fitted_to_one_direction() -> tuple[Tensor, Tensor, Tensor]:
    """A matrix, its values in W4A8, and inputs that are nearly multiples of one vector."""
    direction = normal(1, 128, seed=3).abs()
    x = normal(600, 1, seed=4) * direction + 0.003 * normal(600, 128, seed=5)
    weight = normal(96, 128, seed=6) / 128**0.5
    calibrated = x[:512]
    size = calibrated.abs()
    ends = calibrated.amin(0), calibrated.amax(0)
    statistics = InputStatistics(
        512, calibrated.T @ calibrated / 512, size.mean(0), size.amax(0), *ends, calibrated[:64]
    )
    recipe = RptqRecipe(BuildConfig(quantization="rptq", bits="w4a8"))
    return weight, recipe.quantize(weight, statistics).dequantize(), x[512:]


def metrics_with_outputs(actual: Tensor, weight: Tensor, x: Tensor) -> ErrorMetrics:
    outputs = measure_quantized_output_gain(actual, weight, [x])
    return replace(
        compare_matrix("w", actual, weight)[0],
        output_gain=outputs.gain,
        output_gain_std=outputs.std,
    )


def test_fitted_scales_shrink_a_matrix_and_not_its_outputs() -> None:
    weight, actual, x = fitted_to_one_direction()
    metrics, bound = metrics_with_outputs(actual, weight, x), weight_bound("float32", "rptq")
    assert metrics.gain < 1 - bound.gain
    assert metrics.output_gain == pytest.approx(1, abs=1e-3)
    assert not bound.describe_violations(metrics)
    alone = compare_matrix("w", actual, weight)[0]
    assert "|gain - 1|" in " ".join(bound.describe_violations(alone)), "judged without its outputs"


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_on_such_a_matrix_is_seen(factor: float) -> None:
    weight, actual, x = fitted_to_one_direction()
    metrics, bound = (
        metrics_with_outputs(factor * actual, weight, x),
        weight_bound("float32", "rptq"),
    )
    (violation,) = bound.describe_violations(metrics)
    assert violation.startswith("|gain - 1|" if factor < 1 else "output gain - 1")
    assert bound.error_to_bound_ratio(metrics) > 1.3


@pytest.mark.parametrize(("outputs", "std"), [(0.98, 0.0), (1.0, 0.01), (float("nan"), 0.0)])
def test_only_outputs_that_surely_keep_their_size_excuse(outputs: float, std: float) -> None:
    weight = normal(512, 256, seed=7)
    metrics = compare_matrix("w", 0.95 * weight, weight)[0]
    bound = weight_bound("float32", "int4")
    doubtful = replace(metrics, output_gain=outputs, output_gain_std=std)
    assert "|gain - 1|" in " ".join(bound.describe_violations(doubtful))
    certain = replace(metrics, output_gain=1.0, output_gain_std=0.001)
    assert not bound.describe_violations(certain)
    larger = replace(certain, gain=1.05)
    assert "|gain - 1|" in " ".join(bound.describe_violations(larger)), "smaller ones alone"


@pytest.fixture(scope="module")
def one_direction(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose attention returns values near one direction, which o_proj reads."""
    folder = tmp_path_factory.mktemp("one direction") / "llama"
    wide = {"wide": ("llama", {"hidden_size": 128, "num_key_value_heads": 4})}
    with mock.patch.dict(tiny_models.FAMILIES, wide):
        tiny_models.save_hf("wide", folder)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "v_proj" in name:
            rows, columns = tensor.shape
            values = normal(rows, 1, seed=1).abs() * normal(1, columns, seed=2) / columns**0.5
            tensors[name] = values + 0.001 * normal(rows, columns, seed=3)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def build_with_factor(
    checkpoint: Path, out: Path, recipe: tuple[str, dict[str, Any]], factor: float
) -> tuple[dict[str, Any], bool]:
    """Build in float32 with layer 1's o_proj multiplied."""
    quantization, options = recipe
    if quantization != "int8":
        options = options | SMALL
    with change_tensor("layers.1.attn.o_proj.weight", lambda tensor: factor * tensor):
        return build_and_accept(checkpoint, out, "float32", quantization, **options)


def test_a_faultless_engine_with_shrunk_weights_is_accepted(
    one_direction: Path, tmp_path: Path
) -> None:
    report, written = build_with_factor(one_direction, tmp_path / "e", RPTQ_W4A8, 1.0)
    assert written, report["reason"]
    (row,) = [each for each in report["layers"] if each["name"] == "layers.1.attn.o_proj.weight"]
    assert row["gain"] < 1 - weight_bound("float32", "rptq").gain, "it shows what it is to show"
    assert row["output_gain"] == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_factor_on_shrunk_weights_is_refused_and_named(
    factor: float, one_direction: Path, tmp_path: Path
) -> None:
    report, written = build_with_factor(one_direction, tmp_path / "e", RPTQ_W4A8, factor)
    assert not written
    assert report["verdict"] == "bug at layer 1, module attn.o_proj", report["reason"]


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(
    "recipe", RECIPES, ids=[" ".join(map(str, (r, *o.values()))) for r, o in RECIPES]
)
def test_a_factor_is_refused_and_named_in_every_recipe(
    recipe: tuple[str, dict[str, Any]], factor: float, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    report, written = build_with_factor(tiny["llama"], tmp_path / "e", recipe, factor)
    assert not written
    assert report["verdict"] == "bug at layer 1, module attn.o_proj", report["reason"]
