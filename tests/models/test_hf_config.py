"""What a config.json means, where it is silent or says a thing twice: as transformers' classes
resolve it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.errors import CheckpointError
from modelmill.core.module_lookup import import_module_if_exists
from modelmill.nn.rotary import Rotary
from tests.models.test_families import engine
from tests.models.tiny_models import save_raw

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 64,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
TYPES = ("llama", "mistral", "qwen2", "qwen3")
YARN = {"rope_type": "yarn", "factor": 8.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
RESOLVED: dict[str, dict[str, Any]] = {
    "yarn beside new parameters": {
        "rope_parameters": PLAIN,
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    },
    "the same with a theta on top": {
        "rope_theta": 5e5,
        "rope_parameters": PLAIN,
        "rope_scaling": YARN,
    },
    "linear beside new parameters": {
        "rope_parameters": PLAIN,
        "rope_scaling": {"type": "linear", "factor": 3.0},
    },
    "an empty scaling is none": {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": {}},
    "two thetas": {"rope_theta": 1e4, "rope_parameters": PLAIN},
    "theta within the scaling": {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0} | PLAIN,
    },
    "yarn's length on top": {"original_max_position_embeddings": 512, "rope_scaling": YARN},
    "yarn's length twice": {
        "original_max_position_embeddings": 512,
        "rope_scaling": YARN | {"original_max_position_embeddings": 1024},
    },
    "llama3's length on top": {
        "original_max_position_embeddings": 512,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 2048},
    },
    "llama3 without a length": {"rope_scaling": LLAMA3},
    "part of a head, default": {"rope_theta": 1e5, "partial_rotary_factor": 0.5},
}


def hf_config(raw: dict[str, Any]) -> Any:
    """The configuration object transformers makes of it."""
    sizes = copy.deepcopy({key: value for key, value in raw.items() if key != "model_type"})
    return transformers.AutoConfig.for_model(raw["model_type"], **sizes)


def engine_config(raw: dict[str, Any]) -> Any:
    return import_module_if_exists("modelmill.models", raw["model_type"]).config_from_hf(raw)


def same_rotation(raw: dict[str, Any]) -> None:
    model = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(hf_config(raw))
    rotary = Rotary(engine_config(raw).rope)
    torch.testing.assert_close(rotary.inv_freq, model.inv_freq, rtol=1e-6, atol=0)
    assert rotary.factor == pytest.approx(model.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("case", RESOLVED)
def test_the_rotation_is_the_one_transformers_resolves(model_type: str, case: str) -> None:
    same_rotation(SIZES | RESOLVED[case] | {"model_type": model_type})


@pytest.mark.parametrize("model_type", TYPES)
def test_a_length_that_is_absent_is_the_familys(model_type: str) -> None:
    raw = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"} | {
        "model_type": model_type
    }
    assert engine_config(raw).max_len == hf_config(raw).max_position_embeddings
    same_rotation(raw | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})


@pytest.mark.parametrize("model_type", TYPES)
def test_key_value_heads_that_are_absent_are_the_familys_and_null_means_all(
    model_type: str,
) -> None:
    raw = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    raw |= {"model_type": model_type, "num_attention_heads": 64}
    assert engine_config(raw).kv_heads == hf_config(raw).num_key_value_heads
    assert engine_config(raw | {"num_key_value_heads": None}).kv_heads == 64


WINDOWS: dict[str, dict[str, Any]] = {
    "absent": {},
    "null": {"sliding_window": None},
    "set": {"sliding_window": 7},
    "switched off": {"use_sliding_window": False},
    "on, absent": {"use_sliding_window": True, "max_window_layers": 1},
    "on, null": {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
    "on, past the last layer": {"use_sliding_window": True},
    "on, by layer": {
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("case", WINDOWS)
def test_windows_are_those_of_the_original_classes(model_type: str, case: str) -> None:
    raw = SIZES | WINDOWS[case] | {"model_type": model_type}
    listed = model_type == "mistral" and "layer_types" in raw
    config = hf_config(raw | {"model_type": "ministral"} if listed else raw)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * 3
    expected = [
        config.sliding_window if model_type == "sliding_attention" else None
        for model_type in layer_types
    ]
    assert list(engine_config(raw).windows or [None] * 3) == expected


SMALL = SIZES | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
}
WHOLE: dict[str, dict[str, Any]] = {
    "two dictionaries": {
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "a mistral that lists its layers": {
        "model_type": "mistral",
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "a mistral with qwen's switch": {
        "model_type": "mistral",
        "sliding_window": 7,
        "use_sliding_window": False,
    },
    "part of a head": {"model_type": "llama", "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("case", WHOLE)
def test_logits_of_such_files_equal_transformers(case: str, tmp_path: Path) -> None:
    """AutoConfig reads the same config.json that the engine is built from."""
    raw = SMALL | WHOLE[case]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    torch.manual_seed(3)
    model = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        .float()
        .eval()
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    loop = engine(save_raw(tmp_path / "hf", model.state_dict(), raw), tmp_path / "e")
    ids = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.1
    assert (TeacherForcedScorer(loop).compute_logits([ids])[0] - expected).abs().max() < 1e-4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "by layer type": (
        {"rope_parameters": {"full_attention": PLAIN}},
        "rope_parameters .*'full_attention'",
    ),
    "scaled part of a head": (
        {"partial_rotary_factor": 0.5, "rope_scaling": YARN},
        r"partial_rotary_factor=0\.5",
    ),
    "part within": (
        {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
        r"partial_rotary_factor=0\.5",
    ),
    "no length": (
        {"original_max_position_embeddings": "x", "rope_scaling": YARN},
        "original_max_position_embeddings",
    ),
    "a length of 0": (
        {"original_max_position_embeddings": 0, "rope_scaling": LLAMA3},
        "must be above 0",
    ),
    "no factor": (
        {"rope_parameters": {"rope_type": "yarn"}},
        r"rope_parameters\.factor is missing",
    ),
    "no dictionary": ({"rope_parameters": [1]}, "rope_parameters must be an object"),
    "odd heads": ({"head_dim": 63}, "head_dim=63 is odd"),
    "odd heads without a key of their own": (
        {"hidden_size": 1, "head_dim": None},
        r"hidden_size=1 of num_attention_heads=\d+ heads makes 1 of each, an odd number",
    ),
    "two channels, dynamic": (
        {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "2 channels",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_rotated_is_one_line(case: str) -> None:
    changes, line = REFUSED[case]
    with pytest.raises(CheckpointError, match=line) as caught:
        engine_config(SIZES | changes | {"model_type": "llama"})
    assert "\n" not in str(caught.value)


QWEN = {
    "model_type": "qwen",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "vocab_size": 64,
}


def test_qwen_v1_heads_that_cannot_rotate_are_refused() -> None:
    with pytest.raises(CheckpointError, match="kv_channels=5 is odd"):
        engine_config(QWEN | {"kv_channels": 5})
    with pytest.raises(CheckpointError, match="2 channels"):
        engine_config(QWEN | {"kv_channels": 2, "use_dynamic_ntk": True})
    assert engine_config(QWEN | {"kv_channels": 2}).head_dim == 2


@pytest.mark.parametrize(("changes", "channels"), [({}, 128), ({"attention_head_dim": 16}, 16)])
def test_an_older_name_of_the_channels_of_a_nemotron_h_is_read(
    changes: dict[str, Any], channels: int
) -> None:
    """The first models' files have it, and no head_dim."""
    family = import_module_if_exists("modelmill.models", "nemotron_h")
    assert family is not None
    raw = {"hidden_size": 64, "vocab_size": 97, "layers_block_type": ["mamba", "attention"]}
    assert family.config_from_hf(raw | changes).head_dim == channels
