"""Published files of GLM-4.5 and DeepSeek-V3 hold a layer that predicts further tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.accept.build_and_accept import build_and_accept
from tests.models.all_families import CASES

pytest.importorskip("transformers")
FAMILIES = ("glm4_moe", "deepseek_v3")


def save(name: str, folder: Path, *extra: str) -> None:
    """A seeded checkpoint with further tensors in the layer behind the last."""
    CASES[name].save(folder)
    path = folder / "model.safetensors"
    further = {f"model.layers.2.{each}": torch.ones(4) for each in extra}
    save_file(load_file(path) | further, path)


@pytest.mark.parametrize("name", FAMILIES)
def test_its_layer_is_left_out_and_reported(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "hf", "eh_proj.weight", "enorm.weight", "mlp.gate.weight")
    report, written = build_and_accept(tmp_path / "hf", tmp_path / "e", "float32", "none")
    assert written, report.get("reason", report)
    assert "multi-token prediction" in str(report["unused_tensors"])


@pytest.mark.parametrize("name", FAMILIES)
def test_another_layer_behind_the_last_is_refused(name: str, tmp_path: Path) -> None:
    """Without the matrix that such a layer has, the config may have lost a layer."""
    save(name, tmp_path / "hf", "input_layernorm.weight", "mlp.gate.weight")
    report, written = build_and_accept(tmp_path / "hf", tmp_path / "e", "float32", "none")
    assert not written
    assert "model.layers.2" in report["reason"]


NAMED_APART = {
    "qwen3_next": "mtp.fc.weight",
    "qwen3_5_text": "mtp.layers.0.mlp.up_proj.weight",
    "qwen3_5_moe_text": "mtp.norm.weight",
    "ernie4_5_moe": "model.mtp_block.0.input_layernorm.weight",
    "exaone_moe": "mtp.fc.weight",
}


@pytest.mark.parametrize("name", NAMED_APART)
def test_heads_with_names_of_their_own_are_left_out(name: str, tmp_path: Path) -> None:
    CASES[name].save(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(path) | {NAMED_APART[name]: torch.ones(4)}, path)
    report, written = build_and_accept(tmp_path / "hf", tmp_path / "e", "float32", "none")
    assert written, report.get("reason", report)
    assert "multi-token prediction" in str(report["unused_tensors"])
