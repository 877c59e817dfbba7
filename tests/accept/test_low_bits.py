"""Engines of few bits: honest ones are accepted, and every planted fault is refused and named as in
wide ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from modelmill.ops import int4_linear as op
from modelmill.ops import registry
from modelmill.quant import awq
from tests.accept.build_and_accept import build_and_accept, save_tiny
from tests.accept.planted_faults import faults, plant_fault

SMALL = {"calibration_samples": 4, "calibration_length": 64, "group_size": 32}
CASES = [(family, fault.name) for family in ("llama", "gpt2", "qwen") for fault in faults(family)]
HONEST = ("gpt2", "llama", "llama-bias", "llama-mqa", "llama-tied", "qwen", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: save_tiny(name, root / name) for name in HONEST}


@pytest.mark.parametrize("name", HONEST)
def test_a_faultless_engine_is_accepted(name: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    settings = [("bfloat16", "awq+gptq"), ("float32", "nearest"), ("float16", "nearest")]
    if name == "llama":
        settings += [("float32", "gptq"), ("float32", "awq")]
    for dtype, method in settings:
        report, written = build_and_accept(
            tiny[name], tmp_path / (dtype + method), dtype, "int4", method=method, **SMALL
        )
        assert written, f"{dtype} {method}: {report['reason']}"


@pytest.mark.parametrize(
    "options", [{"symmetric": True}, {"group_size": -1}, {"quantize_head": True}], ids=str
)
def test_so_is_one_of_every_form(
    options: dict[str, Any], tiny: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("llama", "llama-tied"):
        report, written = build_and_accept(
            tiny[name], tmp_path / name, "bfloat16", "int4", **(SMALL | options)
        )
        assert written, report["reason"]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_fault_is_refused_and_named(
    family: str, name: str, tiny: dict[str, Path], tmp_path: Path
) -> None:
    fault = next(f for f in faults(family) if f.name == name)
    settings = [("bfloat16", "nearest")]
    if family == "llama" and name in ("o_proj x 1.05", "k renamed v"):
        settings += [("float32", "awq+gptq")]
    for dtype, method in settings:
        with plant_fault(fault, family):
            report, written = build_and_accept(
                tiny[family], tmp_path / "e", dtype, "int4", method=method, **SMALL
            )
        assert not written, f"{dtype} {method}"
        assert (report["layer"], report["module"] in fault.modules) == (fault.layer, True), report[
            "reason"
        ]


def test_a_fold_that_forgets_one_side_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    """The norm is divided, the columns are left alone."""
    real_fold = awq.fold_scales

    def half(block: Any, site: str, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if site != "up":
            return real_fold(block, site, scales, dtype)
        block.norm(site).weight = block.norm(site).weight / scales
        return scales

    with mock.patch.object(awq, "fold_scales", half):
        report, written = build_and_accept(
            tiny["llama"], tmp_path / "e", "float32", "int4", method="awq", **SMALL
        )
    assert not written
    assert report["module"] in ("mlp.gate_proj", "mlp.up_proj")


def test_a_kernel_that_errs_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Offsets are left out of one group: far less than what 4 bits cost, but wrong."""
    real_linear = op.int4_linear

    def wrong(
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        offset: Any,
        group: int,
        bias: Any,
    ) -> Any:
        scale = scale.clone()
        scale[:, 0] *= 1.01
        return real_linear(x, weight, scale, offset, group, bias)

    real = registry.select_backends

    def resolve(device: str, *more: Any) -> Any:

        return real(device, *more).replace({"int4_linear": wrong})

    with mock.patch("modelmill.runtime.engine_core.select_backends", resolve):
        report, written = build_and_accept(
            tiny["llama"], tmp_path / "e", "float32", "int4", method="nearest", **SMALL
        )
    assert not written
    assert report["module"].endswith("_proj")


def test_the_report_tells_what_quantization_cost(tiny: dict[str, Path], tmp_path: Path) -> None:
    report, written = build_and_accept(
        tiny["llama"], tmp_path / "e", "float32", "int4", method="awq+gptq", **SMALL
    )
    assert written
    assert report["logits"]["mean_kl"] > 1e-3, (
        "against the checkpoint, not against the engine's own weights"
    )
    assert report["logits"]["rel_l2"] < 1e-4, (
        "the arithmetic is judged with the engine's own weights"
    )
    assert 0 < report["logits"]["agreement"] <= 1
    assert report["bytes"] > 0
    assert len(report["quantization_errors"]) == 3 * 4
    assert {"layer", "module", "before", "after", "bits", "outliers"} <= set(
        report["quantization_errors"][0]
    )
