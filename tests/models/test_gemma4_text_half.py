"""The language model of a multimodal checkpoint of Gemma 4, as transformers writes it."""

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
from modelmill.core.errors import CheckpointError
from tests.models.all_families import CASES
from tests.models.text_half import check_logits, seeded_model
from tests.models.tiny_models import save_model
from tests.trust.error_lines import check_one_line

transformers = pytest.importorskip("transformers")
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 8,
}  # fmt: skip
AUDIO = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 24,
    "subsampling_conv_channels": [4, 2],
}  # fmt: skip


UNIFIED_VISION = {
    "patch_size": 4, "pooling_kernel_size": 1, "mm_embed_dim": 16, "mm_posemb_size": 8,
    "output_proj_dims": 16,
}  # fmt: skip
# what the text class of a unified checkpoint has not
ABSENT = (
    "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "num_experts",
    "top_k_experts", "moe_intermediate_size",
)  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    """A seeded ``Gemma4ForConditionalGeneration`` with vision and audio."""
    text = CASES["gemma4_text"].raw()
    config = transformers.Gemma4Config(text_config=text, vision_config=VISION, audio_config=AUDIO)
    return seeded(transformers.Gemma4ForConditionalGeneration, config, tmp_path / "hf")


def seeded(cls: Any, config: Any, folder: Path) -> tuple[Path, Any]:
    """A seeded model and the folder that it is saved in; its norms do not add one themselves."""
    model = seeded_model(cls, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(1.0)
            if name.endswith("q_norm.weight"):
                parameter.mul_(parameter.numel() ** -0.5)
    save_model(model, folder)
    return folder, model


def test_its_logits_are_those_of_the_whole_model(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = saved
    checkpoint = open_checkpoint(folder)
    assert checkpoint.model_type == "gemma4_text"
    others = ("vision", "audio")
    assert any(
        other in name for name in load_file(folder / "model.safetensors") for other in others
    )
    assert not [n for n in checkpoint.names() if any(other in n for other in others)]
    plan = make_build_plan(checkpoint, BuildConfig(dtype="float32", target="cpu"))
    warnings = " ".join(plan.warnings)
    assert "vision_config" in warnings
    assert "audio_config" in warnings
    check_logits(folder, model, tmp_path / "e")


def test_a_unified_checkpoint(tmp_path: Path) -> None:
    """One without towers: patches and frames are projected. Its text class has fewer switches."""
    text = CASES["gemma4_text"].raw()
    text = {key: each for key, each in text.items() if key not in ABSENT}
    del text["model_type"]
    config = transformers.Gemma4UnifiedConfig(
        text_config=text, vision_config=UNIFIED_VISION, audio_config={"audio_embed_dim": 16}
    )
    cls = transformers.Gemma4UnifiedForConditionalGeneration
    folder, model = seeded(cls, config, tmp_path / "hf")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.model_type == "gemma4_text"
    names = checkpoint.names()
    assert len(names) < len(load_file(folder / "model.safetensors"))
    assert not [
        n for n in names if not n.startswith(("model.layers.", "model.embed", "model.norm"))
    ]
    check_logits(folder, model, tmp_path / "e")


def test_keys_and_values_that_are_not_used(saved: tuple[Path, Any], tmp_path: Path) -> None:
    """Published files have projections of layers that attend to another layer's keys."""
    folder, model = saved
    path = folder / "model.safetensors"
    stem = "model.language_model.layers.4.self_attn"
    more = {f"{stem}.{name}_proj.weight": torch.randn(32, 48) for name in "kv"}
    save_file(load_file(path) | more | {f"{stem}.k_norm.weight": torch.ones(16)}, path)
    check_logits(folder, model, tmp_path / "e")


def test_a_last_layer_with_a_window_is_named(tmp_path: Path) -> None:
    raw = CASES["gemma4_text"].raw(layer_types=["sliding_attention", "full_attention"] * 3)
    raw["layer_types"][-1] = "sliding_attention"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plan = make_build_plan(
        checkpoint_from_config(tmp_path), BuildConfig(dtype="float32", target="cpu")
    )
    assert plan.model_config.windows[-1] is None
    assert "the last layer has full attention" in " ".join(plan.warnings)


WITHOUT_EFFECT: dict[str, tuple[dict[str, Any], str]] = {
    "KV heads of full attention where values have a projection": (
        {"attention_k_eq_v": False}, "num_global_key_value_heads",
    ),
    "sizes beside those by layer": (
        {"per_layer_config": {str(i): {"head_dim": 32} for i in (1, 3, 5)}}, "global_head_dim",
    ),
    "a pattern that the class has not": ({"sliding_window_pattern": 2}, "sliding_window_pattern"),
    "a part of a default rotation": (
        {"rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 2000.0, "beta": 1},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }}, "beta",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_has_no_effect_is_named(name: str, tmp_path: Path) -> None:
    """As in transformers, whose logits the model still has (``test_dense_families``)."""
    changes, keys = WITHOUT_EFFECT[name]
    (tmp_path / "config.json").write_text(json.dumps(CASES["gemma4_text"].raw(**changes)))
    plan = make_build_plan(
        checkpoint_from_config(tmp_path), BuildConfig(dtype="float32", target="cpu")
    )
    [warning] = [each for each in plan.warnings if "no effect" in each]
    assert keys in warning


def test_experts_that_are_off_are_refused_by_name(tmp_path: Path) -> None:
    raw = CASES["gemma4_text"].raw(enable_moe_block=False)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="num_experts=4"):
        make_build_plan(
            checkpoint_from_config(tmp_path), BuildConfig(dtype="float32", target="cpu")
        )


def test_full_attention_with_narrower_heads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CASES["gemma4_text"].raw(global_head_dim=8)))
    with pytest.raises(CheckpointError, match="global_head_dim=8 below head_dim=16") as error:
        make_build_plan(
            checkpoint_from_config(tmp_path), BuildConfig(dtype="float32", target="cpu")
        )
    check_one_line(error.value)
