"""The bias of the experts' choice stays in float32, as in the files and in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.nn.moe import TopKRouting
from modelmill.runtime.engine_core import EngineCore
from tests.models.all_families import CASES
from tests.models.saved_family import label

pytest.importorskip("transformers")
FAMILIES = (
    "deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1", "minimax_m2", "ernie4_5_moe",
    "exaone_moe", "solar_open", "kimi_k2",
)  # fmt: skip


BUILDS = [
    *(pytest.param(name, "none", id=label(name)) for name in FAMILIES),
    # it measures activations, and so writes a layer after it has computed
    pytest.param("kimi_k2", "fp8", id="fp8"),
]


@pytest.mark.parametrize(("name", "recipe"), BUILDS)
def test_its_values_are_those_of_the_file(name: str, recipe: str, tmp_path: Path) -> None:
    CASES[name].save(tmp_path / "hf")
    checkpoint = open_checkpoint(tmp_path / "hf")
    options = BuildConfig(dtype="bfloat16", target="cpu", quantization=recipe)
    build(make_build_plan(checkpoint, options), tmp_path / "e", None)
    config = RunConfig(device="cpu", kv_cache_bytes=1 << 22)
    model = EngineCore.open(tmp_path / "e", config).model
    biases = [each.selection_bias for each in model.modules() if isinstance(each, TopKRouting)]
    stored = [
        checkpoint.get(each).flatten()
        for each in sorted(checkpoint.names())
        if each.endswith("e_score_correction_bias")
    ]
    assert stored
    for bias, expected in zip(biases, stored, strict=True):
        assert bias is not None
        assert torch.equal(bias, expected)
