"""The language model of a vision-language checkpoint of Qwen3.5, as transformers writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.runtime.engine_core import EngineCore
from tests.models.families.qwen3_5_moe_text import CASE
from tests.models.tiny_models import save_model

transformers = pytest.importorskip("transformers")
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 48,
    "num_position_embeddings": 16,
}  # fmt: skip


def save_vision_language(folder: Path, **changes: Any) -> Any:
    """A seeded ``Qwen3_5MoeForConditionalGeneration``."""
    text = {**CASE.raw(), "model_type": "qwen3_5_moe_text", **changes}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=VISION)
    torch.manual_seed(0)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).float().eval()
    save_model(model, folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] = text
    (folder / "config.json").write_text(json.dumps(raw))
    return model


@torch.no_grad()
def test_its_logits_are_those_of_the_whole_model(tmp_path: Path) -> None:
    model = save_vision_language(tmp_path / "hf")
    checkpoint = open_checkpoint(tmp_path / "hf")
    assert checkpoint.model_type == "qwen3_5_moe_text"
    assert not [name for name in checkpoint.names() if "visual" in name]
    plan = make_build_plan(checkpoint, BuildConfig(dtype="float32", target="cpu"))
    assert "vision_config" in " ".join(plan.warnings)
    build(plan, tmp_path / "e", None)
    engine = EngineCore.open(tmp_path / "e", RunConfig(device="cpu", kv_cache_bytes=1 << 22))
    ids = [torch.arange(2, 2 + count).tolist() for count in (1, 20)]
    for actual, row in zip(
        TeacherForcedScorer(engine).compute_logits(ids, decode_from=5), ids, strict=True
    ):
        expected = model(torch.tensor([row])).logits[0]
        assert (actual - expected).abs().max() < 1e-4


def test_stacked_experts_are_single_ones(tmp_path: Path) -> None:
    save_vision_language(tmp_path)
    single = open_checkpoint(tmp_path)
    expected = {name: single.get(name).clone() for name in single.names() if ".experts." in name}
    tensors = load_file(tmp_path / "model.safetensors")
    stacked = stack_experts(tensors)
    assert stacked.keys() != tensors.keys()
    save_file(stacked, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert {name for name in checkpoint.names() if ".experts." in name} == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.get(name), tensor)
        assert checkpoint.tensor_info(name).shape == tuple(tensor.shape)


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All experts of a layer in one tensor, gate above up."""
    out = {name: t for name, t in tensors.items() if ".experts." not in name or t.dim() == 3}
    stems = {name.partition(".experts.")[0] for name in tensors if ".experts.0." in name}
    for stem in stems:
        parts = {
            part: torch.stack([tensors[f"{stem}.experts.{i}.{part}.weight"] for i in range(4)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        both = torch.cat((parts["gate_proj"], parts["up_proj"]), 1)
        out |= {
            f"{stem}.experts.gate_up_proj": both,
            f"{stem}.experts.down_proj": parts["down_proj"],
        }
    return out
