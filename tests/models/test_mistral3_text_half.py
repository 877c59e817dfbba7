"""The language model of a vision-language checkpoint of Mistral 3, as transformers writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError
from modelmill.models import ministral3, mistral4
from modelmill.nn.attention_temperature import AttentionTemperature
from tests.models.all_families import CASES
from tests.models.family_cases import SMALL
from tests.models.text_half import check_logits, seeded_model
from tests.models.tiny_models import edit, save_model

transformers = pytest.importorskip("transformers")
VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4, "head_dim": 8,
}  # fmt: skip
TEXTS = {
    "mistral": {**SMALL, "model_type": "mistral", "head_dim": 12, "sliding_window": 20},
    "ministral3": CASES["ministral3"].raw(),
    "mistral4": CASES["mistral4"].raw(),
}


def save_vision_language(folder: Path, text: dict[str, Any], *, tied: bool) -> Any:
    """A seeded ``Mistral3ForConditionalGeneration``, and the config.json of its publishers."""
    config = transformers.Mistral3Config(
        text_config=text, vision_config=VISION, tie_word_embeddings=tied
    )
    model = seeded_model(transformers.Mistral3ForConditionalGeneration, config)
    save_model(model, folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] = text
    (folder / "config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TEXTS)
def test_its_logits_are_those_of_the_whole_model(name: str, tied: bool, tmp_path: Path) -> None:
    model = save_vision_language(tmp_path / "hf", TEXTS[name], tied=tied)
    checkpoint = open_checkpoint(tmp_path / "hf")
    assert checkpoint.model_type == name
    assert not [n for n in checkpoint.names() if "vision" in n or "projector" in n]
    plan = make_build_plan(checkpoint, BuildConfig(dtype="float32", target="cpu"))
    assert "vision_config" in " ".join(plan.warnings)
    check_logits(tmp_path / "hf", model, tmp_path / "e")


def test_another_language_model_is_refused_by_name(tmp_path: Path) -> None:
    save_vision_language(tmp_path, TEXTS["mistral"], tied=False)
    edit(tmp_path, lambda raw: raw["text_config"].update(model_type="mistral5"))
    with pytest.raises(CheckpointError, match="mistral, ministral3, mistral4 are read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "sizes"),
    [
        (ministral3, "Ministral3Config", {"head_dim": 12, "max_position_embeddings": 262144}),
        (mistral4, "Mistral4Config", {"num_key_value_heads": 4}),
    ],
)
def test_a_rotation_that_the_config_leaves_out(
    family: Any, name: str, sizes: dict[str, Any]
) -> None:
    config = family.config_from_hf({**SMALL, **sizes})
    stated = getattr(transformers, name)().rope_parameters
    length = stated["original_max_position_embeddings"]
    assert config.attention_temperature == AttentionTemperature(
        stated["llama_4_scaling_beta"], length
    )
    assert config.rope is not None
    assert config.rope.base == stated["rope_theta"]
    assert {k: v for k, v in config.rope.scaling.items() if k != "rope_theta"}.items() <= (
        {**stated, "rope_type": "yarn"}.items()
    )
