"""One fault at a time in our own build path: the engine is refused, and the fault's layer and
module are named.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from modelmill.accept.run import compare_engine, sample_ids
from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import TensorMismatch
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import SETTINGS, build_and_accept, save_tiny
from tests.accept.planted_faults import faults, plant_fault

CASES = [(family, fault.name) for family in ("llama", "gpt2", "qwen") for fault in faults(family)]
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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: save_tiny(name, root / name) for name in HONEST}


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_build_is_refused_in_every_dtype(
    family: str, name: str, tiny: dict[str, Path], tmp_path: Path
) -> None:
    fault = next(f for f in faults(family) if f.name == name)
    for dtype, recipe in SETTINGS:
        with plant_fault(fault, family):
            report, written = build_and_accept(tiny[family], tmp_path / "e", dtype, recipe)
        assert not written, f"{dtype} {recipe}"
        assert not list(tmp_path.iterdir()), "nothing is left behind"
        assert (report["layer"], report["module"] in fault.modules) == (fault.layer, True), report[
            "reason"
        ]
        assert f"layer {fault.layer}, module {report['module']}" in report["refusal"]
        assert "\n" not in report["refusal"]


@pytest.mark.parametrize("name", HONEST)
def test_a_faultless_engine_is_accepted_in_every_dtype(
    name: str, tiny: dict[str, Path], tmp_path: Path
) -> None:
    for number, (dtype, recipe) in enumerate(SETTINGS):
        report, written = build_and_accept(tiny[name], tmp_path / str(number), dtype, recipe)
        assert written, f"{dtype} {recipe}: {report['reason']}"
        assert report["verdict"] == "numerical noise"


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen"])
def test_compare_names_the_fault_of_an_unjudged_engine(
    family: str, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """What ``modelmill compare`` computes, for an engine that was built without acceptance."""
    fault = next(f for f in faults(family) if f.name == "o_proj x 1.05")
    checkpoint = open_checkpoint(tiny[family])
    with plant_fault(fault, family):
        build(
            make_plan(checkpoint, BuildConfig(dtype="bfloat16", quantization="int8")),
            tmp_path / "e",
            None,
        )
    loop = EngineCore.open(tmp_path / "e", RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    assert loop.artifact is not None
    report = compare_engine(loop, checkpoint, sample_ids(loop.artifact))
    assert report["verdict"] == "bug at layer 1, module attn.o_proj"


def test_gpt2_c_attn_left_as_stored_does_not_even_fit(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[in, 3·in] is not square: the plan refuses it by shape before a weight is read."""
    from dataclasses import replace

    from modelmill.models import gpt2

    real_rules = gpt2.rules
    monkeypatch.setattr(
        gpt2,
        "rules",
        lambda config: [
            replace(r, how="copy") if "c_attn.weight" in r.sources[0] else r
            for r in real_rules(config)
        ],
    )
    with pytest.raises(TensorMismatch, match="c_attn"):
        make_plan(open_checkpoint(tiny["gpt2"]), BuildConfig())
