"""Where the reference computes: the same numbers everywhere, the GPU only where its float32 can be
believed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept import reference_device
from modelmill.accept.reference import ReferenceModel, open_reference
from modelmill.accept.reference_device import max_first_layer_device_rel_l2, place_reference
from modelmill.accept.run import run_engine_acceptance
from modelmill.artifact.store import open_artifact
from modelmill.checkpoint.open import Checkpoint, open_checkpoint
from modelmill.core.config import RunConfig
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import build_and_accept, save_tiny

FAMILIES = ("llama", "qwen", "qwen3", "gpt2")
IDS = list(range(3, 40))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("tiny")
    return {family: open_checkpoint(save_tiny(family, folder / family)) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_of_a_reference_is_where_it_computes(
    family: str, checkpoints: dict[str, Checkpoint]
) -> None:
    """On a device without values: whatever had stayed on the CPU could not be multiplied with the
    rest.
    """
    reference = open_reference(checkpoints[family], device="meta")
    x = reference.embed(torch.tensor(IDS))
    for index in range(reference.num_layers):
        trace = reference.run_layer(index, reference.layer_weights(index), x, len(IDS))
        assert {io.output.device.type for io in trace.values()} == {"meta"}
        x = trace["output"].output
    assert reference.head(x)["logits"].output.shape[0] == len(IDS)
    heads = (
        reference.norm_and_rope_queries(0, torch.randn(4, reference.num_heads * reference.head_dim))
        if family != "gpt2"
        else None
    )  # type: ignore[attr-defined]
    assert heads is None or heads.device.type == "meta"


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_agrees_and_fewer_bits_do_not(
    family: str, checkpoints: dict[str, Checkpoint]
) -> None:
    reference = open_reference(checkpoints[family])
    assert max_first_layer_device_rel_l2(reference, open_reference(checkpoints[family]), IDS) == 0
    assert (
        max_first_layer_device_rel_l2(
            reference, open_reference(checkpoints[family], torch.float64), IDS
        )
        < reference_device.MAX_CPU_GPU_REL_L2
    )
    assert (
        max_first_layer_device_rel_l2(reference, coarse(open_reference(checkpoints[family])), IDS)
        > reference_device.MAX_CPU_GPU_REL_L2
    )


def coarse(reference: ReferenceModel) -> ReferenceModel:
    """Its matrices with the ten bits of TF32."""
    plain = reference.layer_weights

    def layer_weights(index: int) -> Any:
        weights = plain(index)
        return {
            name: w._replace(weight=w.weight.half().float()) if w.weight.dim() > 1 else w
            for name, w in weights.items()
        }

    reference.layer_weights = layer_weights  # type: ignore[method-assign]
    return reference


def test_a_report_says_where_its_reference_computed(
    checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    report, _ = build_and_accept(checkpoints["llama"].path, tmp_path / "e", "float32", "none")
    assert report["reference"] == "float32 on the CPU"


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["none", "int8", "int4", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_reports_what_the_cpu_reports(
    family: str,
    recipe: str,
    checkpoints: dict[str, Checkpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from modelmill.builder.build_engine import build
    from modelmill.builder.plan import make_build_plan
    from modelmill.core.config import BuildConfig

    method = {"method": "nearest"} if recipe in ("int4", "fp8") else {}
    plan = make_build_plan(
        checkpoints[family],
        BuildConfig(dtype="float32", quantization=recipe, target="cuda", **method),
    )
    build(plan, tmp_path / "e", None)
    there = run_engine_acceptance(tmp_path / "e", plan.checkpoint)
    monkeypatch.setattr(reference_device, "GPU_HEADROOM_BYTES", 1 << 60)
    here = run_engine_acceptance(tmp_path / "e", plan.checkpoint)
    assert "TF32 off" in there["reference"]
    assert "on the CPU: on the GPU" in here["reference"]
    assert there["accepted"], there["reason"]
    assert here["accepted"], here["reason"]
    assert [row["name"] for row in there["layers"]] == [row["name"] for row in here["layers"]]
    for one, other in zip(there["layers"], here["layers"], strict=True):
        assert one["rel_l2"] == pytest.approx(other["rel_l2"], rel=0.05, abs=2e-6), one["name"]


@pytest.mark.gpu
def test_a_gpu_with_forced_tf32_is_not_believed(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_and_accept(checkpoints["llama"].path, tmp_path / "e", "float32", "none")
    loop = EngineCore.open(
        open_artifact(tmp_path / "e"), RunConfig(device="cuda", kv_cache_bytes=1 << 24)
    )
    real_open = reference_device.open_reference

    def open_coarse_on_gpu(
        checkpoint: Any, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> ReferenceModel:
        reference = real_open(checkpoint, dtype, device)
        return coarse(reference) if torch.device(device).type == "cuda" else reference

    monkeypatch.setattr(reference_device, "open_reference", open_coarse_on_gpu)
    placement = place_reference(checkpoints["llama"], loop, IDS)
    assert "off by" in placement.description
    assert placement.reference.device.type == "cpu"


def test_a_gpu_that_cannot_compute_the_reference_leaves_it_to_the_cpu(
    checkpoints: dict[str, Checkpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("Expected all tensors to be on the same device,\nbut found at least two")

    def elsewhere(checkpoint: Checkpoint, loop: Any, ids: Any) -> reference_device.PlacedReference:
        reference = open_reference(checkpoint)
        monkeypatch.setattr(reference, "run_layer", fails)
        return reference_device.PlacedReference(reference, "float32 on a GPU", "cuda:0")

    monkeypatch.setattr("modelmill.accept.run.place_reference", elsewhere)
    report, written = build_and_accept(checkpoints["llama"].path, tmp_path / "e", "float32", "none")
    assert written
    assert report["accepted"]
    assert "float32 on the CPU: on the GPU it failed (Expected all tensors" in report["reference"]
    assert "it runs on the CPU" in caplog.text


def test_what_fails_on_the_cpu_is_reported(
    checkpoints: dict[str, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr("modelmill.accept.run.place_reference", fails)
    with pytest.raises(RuntimeError, match="no"):
        build_and_accept(checkpoints["llama"].path, tmp_path / "e", "float32", "none")
