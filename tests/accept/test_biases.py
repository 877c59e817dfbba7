"""A bias that is lost, or that no checkpoint has: a low-bit engine's reference computes with what
the engine holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from modelmill.accept import run
from tests.accept.build_and_accept import build_and_accept

CALIBRATED = {"calibration_samples": 4, "calibration_length": 64}
RECIPES: dict[str, dict[str, Any]] = {
    "int4": {"method": "nearest", "group_size": 32},
    "int8": {},
    "fp8": {"method": "nearest"},
    "smoothquant": CALIBRATED | {"alpha": "0.5", "max_layer_error": None},
    "rptq": CALIBRATED,
}


def remove_bias(path: str) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        module = model.layers[1].get_submodule(path)
        assert bool(module.bias.any())
        module.bias = None

    return plant


def zeroed(model: Any) -> None:
    """A norm's, which is always there."""
    norm = model.layers[1].mlp_norm
    norm.bias = torch.zeros_like(norm.bias)


def made_up(model: Any) -> None:
    projection = model.layers[1].mlp.down_proj
    assert projection.bias is None
    projection.bias = torch.full((projection.shape[0],), 0.1)


CASES: dict[str, tuple[str, Callable[[Any], None], tuple[str, ...]]] = {
    "qkv": (
        "llama-bias",
        remove_bias("attn.qkv_proj"),
        ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    ),
    "o": ("llama-bias", remove_bias("attn.o_proj"), ("attn.o_proj",)),
    "gate and up": (
        "llama-bias",
        remove_bias("mlp.gate_up_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ),
    "fc": ("gpt2", remove_bias("mlp.fc_proj"), ("mlp.fc_proj",)),
    "norm": ("gpt2", zeroed, ("mlp_norm",)),
    "made up": ("llama", made_up, ("mlp.down_proj",)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_bias_is_refused(
    case: str, recipe: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    name, plant, modules = CASES[case]
    real_open = run.EngineCore.open

    def open_with_fault(*args: Any, **options: Any) -> Any:
        loop = real_open(*args, **options)
        plant(loop.model)
        return loop

    with mock.patch.object(run.EngineCore, "open", open_with_fault):
        report, written = build_and_accept(
            tiny[name], tmp_path / "e", "float32", recipe, **RECIPES[recipe]
        )
    assert not written
    assert (report["layer"], report["module"] in modules) == (1, True), report["reason"]
    wrong = {row["name"] for row in report["layers"] if not row["ok"]}
    assert {f"layers.1.{module}.bias" for module in modules} <= wrong


@pytest.mark.parametrize("recipe", RECIPES)
def test_faultless_ones_are_accepted(recipe: str, tiny: Mapping[str, Path], tmp_path: Path) -> None:
    for name in ("llama-bias", "gpt2"):
        report, written = build_and_accept(
            tiny[name], tmp_path / name, "float32", recipe, **RECIPES[recipe]
        )
        assert written, report["reason"]
        assert sum(row["name"].endswith(".bias") for row in report["layers"]) >= 3 * 7
