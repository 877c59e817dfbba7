"""One fault at a time in our own build path: the engine is refused, and the fault's layer and
module are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from modelmill.accept.run import acceptance_token_ids, compare_engine
from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import TensorMismatch
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import SETTINGS, build_and_accept
from tests.accept.planted_faults import FAULTS, assert_names, find_fault, plant_fault

HONEST = (
    "gpt2",
    "llama",
    "llama-yarn",
    "llama-mqa",
    "qwen",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "mistral",
)


@pytest.mark.parametrize(("dtype", "recipe"), SETTINGS)
@pytest.mark.parametrize(("family", "name"), FAULTS)
def test_the_build_is_refused_in_every_dtype(
    family: str, name: str, dtype: str, recipe: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    fault = find_fault(family, name)
    with plant_fault(fault, family):
        report, written = build_and_accept(tiny[family], tmp_path / "e", dtype, recipe)
    assert not written
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert_names(report, fault)
    assert f"layer {fault.layer}, module {report['module']}" in report["refusal"]
    assert "\n" not in report["refusal"]


@pytest.mark.parametrize(("dtype", "recipe"), SETTINGS)
@pytest.mark.parametrize("name", HONEST)
def test_a_faultless_engine_is_accepted_in_every_dtype(
    name: str, dtype: str, recipe: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    report, written = build_and_accept(tiny[name], tmp_path / "e", dtype, recipe)
    assert written, report["reason"]
    assert report["verdict"] == "rounding differences only"


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen"])
def test_compare_names_the_fault_of_an_unjudged_engine(
    family: str, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    """What ``modelmill compare`` computes, for an engine that was built without acceptance."""
    fault = find_fault(family, "o_proj x 1.05")
    checkpoint = open_checkpoint(tiny[family])
    with plant_fault(fault, family):
        build(
            make_build_plan(checkpoint, BuildConfig(dtype="bfloat16", quantization="int8")),
            tmp_path / "e",
            None,
        )
    loop = EngineCore.open(tmp_path / "e", RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    assert loop.artifact is not None
    report = compare_engine(loop, checkpoint, acceptance_token_ids(loop.artifact))
    assert report["verdict"] == "bug at layer 1, module attn.o_proj"


def test_gpt2_c_attn_left_as_stored_does_not_even_fit(
    tiny: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[in, 3·in] is not square: the plan refuses it by shape before a weight is read."""
    from dataclasses import replace

    from modelmill.models import gpt2

    real_rules = gpt2.CHECKPOINT_LAYOUT.rename_rules
    monkeypatch.setattr(
        gpt2,
        "rename_rules",
        lambda config: [
            replace(r, how="copy") if "c_attn.weight" in r.sources[0] else r
            for r in real_rules(config)
        ],
        raising=False,
    )
    with pytest.raises(TensorMismatch, match="c_attn"):
        make_build_plan(open_checkpoint(tiny["gpt2"]), BuildConfig())
