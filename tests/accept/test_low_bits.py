"""Engines of few bits: honest ones are accepted, and every planted fault is refused and named as in
wide ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from modelmill.ops import int4_linear as op
from modelmill.ops import registry
from modelmill.quant import awq
from tests.accept.build_and_accept import FAMILIES, build_and_accept
from tests.accept.planted_faults import FAULTS, check_fault_is_named

SMALL = {"calibration_samples": 4, "calibration_length": 64, "group_size": 32}


def _honest_settings(name: str) -> list[tuple[str, str]]:
    settings = [("bfloat16", "awq+gptq"), ("float32", "nearest"), ("float16", "nearest")]
    return [*settings, ("float32", "gptq"), ("float32", "awq")] if name == "llama" else settings


@pytest.mark.parametrize(
    ("name", "dtype", "method"),
    [(name, *setting) for name in FAMILIES for setting in _honest_settings(name)],
)
def test_a_faultless_engine_is_accepted(
    name: str, dtype: str, method: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    report, written = build_and_accept(
        tiny[name], tmp_path / "e", dtype, "int4", method=method, **SMALL
    )
    assert written, report["reason"]


@pytest.mark.parametrize(
    "options", [{"symmetric": True}, {"group_size": -1}, {"quantize_head": True}], ids=str
)
def test_so_is_one_of_every_form(
    options: dict[str, Any], tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    for name in ("llama", "llama-tied"):
        report, written = build_and_accept(
            tiny[name], tmp_path / name, "bfloat16", "int4", **(SMALL | options)
        )
        assert written, report["reason"]


@pytest.mark.parametrize(("family", "name"), FAULTS)
def test_a_fault_is_refused_and_named(
    family: str, name: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    settings = [("bfloat16", "nearest")]
    if family == "llama" and name in ("o_proj x 1.05", "k renamed v"):
        settings += [("float32", "awq+gptq")]
    for dtype, method in settings:
        setting = dtype, "int4", SMALL | {"method": method}
        check_fault_is_named(family, name, tiny[family], tmp_path / "e", setting)


def test_a_fold_that_forgets_one_side_is_refused(tiny: Mapping[str, Path], tmp_path: Path) -> None:
    """The norm is divided, the columns are left alone."""
    real_fold = awq.fold_scales

    def half(block: Any, site: str, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if site != "up":
            return real_fold(block, site, scales, dtype)
        block.producer_norm(site).weight = block.producer_norm(site).weight / scales
        return scales

    with mock.patch.object(awq, "fold_scales", half):
        report, written = build_and_accept(
            tiny["llama"], tmp_path / "e", "float32", "int4", method="awq", **SMALL
        )
    assert not written
    assert report["module"] in ("mlp.gate_proj", "mlp.up_proj")


def test_a_kernel_that_errs_is_refused(tiny: Mapping[str, Path], tmp_path: Path) -> None:
    """Offsets are left out of one group: far less than what 4 bits cost, but wrong."""
    real_linear = op.int4_linear

    def wrong(inputs: Any) -> Any:
        scale = inputs.scale.clone()
        scale[:, 0] *= 1.01
        return real_linear(inputs._replace(scale=scale))

    real = registry.select_backends

    def resolve(device: str, *more: Any) -> Any:

        return real(device, *more).replace({"int4_linear": wrong})

    with mock.patch("modelmill.runtime.engine_core.select_backends", resolve):
        report, written = build_and_accept(
            tiny["llama"], tmp_path / "e", "float32", "int4", method="nearest", **SMALL
        )
    assert not written
    assert report["module"].endswith("_proj")


def test_the_report_tells_what_quantization_cost(tiny: Mapping[str, Path], tmp_path: Path) -> None:
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
