"""The language model of a vision-language checkpoint of Gemma 3, as transformers writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelmill.builder.config_only import checkpoint_from_config
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from tests.models.all_families import CASES
from tests.models.text_half import check_logits, seeded_model
from tests.models.tiny_models import save_model

transformers = pytest.importorskip("transformers")
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
# what the config.json of Gemma 3 27B has
GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
    "mm_tokens_per_image": 256, "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
    "text_config": {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
        "model_type": "gemma3_text", "num_attention_heads": 32, "num_hidden_layers": 62,
        "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    """A seeded ``Gemma3ForConditionalGeneration`` under the names of published files."""
    text = CASES["gemma3_text"].raw()
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=1
    )
    model = seeded_model(transformers.Gemma3ForConditionalGeneration, config)
    save_model(model, tmp_path / "hf")
    return tmp_path / "hf", model


def test_its_logits_are_those_of_the_whole_model(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = saved
    checkpoint = open_checkpoint(folder)
    assert checkpoint.model_type == "gemma3_text"
    assert not [n for n in checkpoint.names() if "vision" in n or "projector" in n]
    plan = make_build_plan(checkpoint, BuildConfig(dtype="float32", target="cpu"))
    assert "vision_config" in " ".join(plan.warnings)
    check_logits(folder, model, tmp_path / "e")


def test_names_of_either_release(saved: tuple[Path, Any], tmp_path: Path) -> None:
    """Those of transformers 4.52 and later in the place of the published files'."""
    folder, model = saved
    path = folder / "model.safetensors"
    stems = {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    }
    renamed = {}
    for name, tensor in load_file(path).items():
        old = next(stem for stem in stems if name.startswith(stem))
        renamed[stems[old] + name.removeprefix(old)] = tensor
    save_file(renamed, path)
    check_logits(folder, model, tmp_path / "e")


def test_published_sizes(tmp_path: Path) -> None:
    """What text_config leaves to the class is as there; the parameters are the text half's."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_27B))
    plan = make_build_plan(
        checkpoint_from_config(tmp_path), BuildConfig(dtype="bfloat16", target="cpu")
    )
    assert plan.model_config.vocab == 262208
    assert plan.model_config.heads == 32
    assert plan.model_config.max_len == 131072, "the scaling's factor is in it"
    assert sum(torch.Size(each.shape).numel() for each in plan.tensors) == 27_009_346_304


@pytest.mark.parametrize("outer", [True, False])
def test_two_wishes_about_the_head_are_settled_by_the_tensors(tmp_path: Path, outer: bool) -> None:
    """transformers ties by the outer one, and writes the head's matrix where it is not tied."""
    text = CASES["gemma3_text"].raw(tie_word_embeddings=not outer)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=1, tie_word_embeddings=outer
    )
    model = seeded_model(transformers.Gemma3ForConditionalGeneration, config)
    save_model(model, tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["tie_word_embeddings"] is outer
    assert written["text_config"]["tie_word_embeddings"] is not outer
    check_logits(tmp_path / "hf", model, tmp_path / "e")
