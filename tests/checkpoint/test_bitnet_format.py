"""Checkpoints of ternary weights: transformers' logits, values of both readers, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelmill.accept.reference.dequantize import DequantizedContainer
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import Checkpoint, open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, UsageError
from tests.accept.build_and_accept import build_and_accept
from tests.models.all_families import CASES
from tests.models.family_cases import transformers_model
from tests.models.saved_family import Saved, compare, drawn_ids
from tests.models.tiny_models import save_model
from tests.trust.error_lines import check_one_line

bitnet = pytest.importorskip("transformers.integrations.bitnet")

NAME = "model.layers.0.mlp.down_proj.weight"
AUTO = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
SETTINGS: dict[str, dict[str, Any]] = {
    "multiplied": AUTO | {"quantization_mode": "offline"},
    "divided": {"quant_method": "bitnet"},
    "online": AUTO | {"quantization_mode": "online"},
    "online, some kept": AUTO | {
        "quantization_mode": "online", "modules_to_not_convert": ["v_proj", "layers.1.mlp"],
    },
}  # fmt: skip


def is_converted(name: str, settings: dict[str, Any]) -> bool:
    left = settings.get("modules_to_not_convert", ())
    return name.endswith("_proj.weight") and not any(each in name for each in left)


def convert(folder: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Store a checkpoint's matrices so; returns the values that they stand for."""
    tensors, stored, values = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        stored[name] = values[name] = tensor
        if not is_converted(name, settings):
            continue
        mean = tensor.abs().mean()
        ternary = (tensor / mean).round().clamp(-1, 1)
        values[name] = ternary * mean
        if settings.get("quantization_mode") != "online":
            stored[name] = bitnet.pack_weights(ternary.clone())
            scale = mean if "linear_class" in settings else 1 / mean
            stored[f"{name}_scale"] = scale.reshape(1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return values


def read_by_both(checkpoint: Checkpoint, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    reference = DequantizedContainer(checkpoint.raw_container, checkpoint.config)
    return checkpoint.get(name), reference.get(name)


@pytest.mark.parametrize("stored", SETTINGS)
def test_logits_are_those_of_transformers_with_these_values(stored: str, tmp_path: Path) -> None:
    raw = CASES["bitnet"].raw()
    model = transformers_model(raw, tmp_path / "made")
    save_model(model, tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw))
    values = convert(tmp_path / "hf", SETTINGS[stored])
    model.load_state_dict(values)
    checkpoint = open_checkpoint(tmp_path / "hf")
    assert set(checkpoint.names()) == set(values)
    for name in values:
        for read in read_by_both(checkpoint, name):
            torch.testing.assert_close(read.double(), values[name].double(), rtol=1e-6, atol=1e-7)
    report, written = build_and_accept(tmp_path / "hf", tmp_path / "e", "float32", "none")
    assert written, report.get("reason", report)
    saved = Saved.__new__(Saved)
    saved.engine = tmp_path / "e"

    def logits(ids: list[int], decode_from: int | None = None) -> torch.Tensor:
        del decode_from
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    compare(saved.open(), logits, drawn_ids(raw["vocab_size"], (7, 33)), (None,))


def written(folder: Path, settings: Any, **changes: torch.Tensor | None) -> Path:
    """A packed matrix, and changes of its tensors by suffix."""
    tensors: dict[str, torch.Tensor | None] = {
        NAME: torch.full((4, 8), 0b10010010, dtype=torch.uint8),
        f"{NAME}_scale": torch.ones(1),
        **changes,
    }
    config = {"model_type": "bitnet", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(present, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_rows_of_a_byte_are_quarters_of_the_matrix(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(tmp_path, AUTO, **{f"{NAME}_scale": torch.tensor([0.5])}))
    expected = torch.tensor([1.0, -1.0, 0.0, 1.0]).repeat_interleave(4)[:, None].expand(-1, 8) / 2
    for read in read_by_both(checkpoint, NAME):
        torch.testing.assert_close(read.double(), expected.double(), rtol=0, atol=0)
    assert checkpoint.tensor_info(NAME).shape == (16, 8)


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception]]] = {
    "linear_class": (AUTO | {"linear_class": "other"}, {}, CheckpointError),
    "quantization_mode": (AUTO | {"quantization_mode": 3}, {}, CheckpointError),
    "use_rms_norm": (AUTO | {"use_rms_norm": True}, {}, CheckpointError),
    "modules_to_not_convert": (AUTO | {"modules_to_not_convert": "x"}, {}, CheckpointError),
    f"without {NAME}_scale": (AUTO, {f"{NAME}_scale": None}, CheckpointError),
    "one number": (AUTO, {f"{NAME}_scale": torch.ones(4)}, CorruptCheckpoint),
}


@pytest.mark.parametrize("words", REFUSED)
def test_other_settings_are_refused_by_name(words: str, tmp_path: Path) -> None:
    settings, changes, error_type = REFUSED[words]
    folder = written(tmp_path, settings, **changes)
    with pytest.raises(error_type) as error:
        open_checkpoint(folder)
    assert words in check_one_line(error.value)


def test_ternary_weights_are_not_kept(tmp_path: Path) -> None:
    CASES["bitnet"].save(tmp_path)
    convert(tmp_path, SETTINGS["multiplied"])
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="ternary weights"):
        make_build_plan(checkpoint, BuildConfig(quantization="keep", target="cpu"))
    plan = make_build_plan(checkpoint, BuildConfig(dtype="float32", target="cpu"))
    assert any("ternary" in line for line in plan.warnings)
