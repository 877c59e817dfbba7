"""Every field of the original configuration classes at other values: transformers' logits, or
refused by its name.

Many fields at once where they may not change anything; one at a time where they do.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.errors import CheckpointError
from tests.models.config_keys import config_warnings
from tests.models.idle_fields import IDLE
from tests.models.test_families import engine
from tests.models.tiny_models import save_raw
from tests.trust.error_lines import check_one_line

transformers = pytest.importorskip("transformers")

TYPES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
SMALL = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
TRAINED = {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, **TRAINED}
LENGTH = 40

# fields that do, each by itself
TOLD: dict[str, list[Any]] = {
    "vocab_size": [61],
    "hidden_size": [48],
    "intermediate_size": [56],
    "num_hidden_layers": [1, 3],
    "num_attention_heads": [2],
    "num_key_value_heads": [1, 4, None],
    "hidden_act": ["gelu", "swish", "relu", "gelu_pytorch_tanh"],
    "max_position_embeddings": [48, 128],
    "rms_norm_eps": [1e-2, 0.0],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True],
    "mlp_bias": [True],
    "head_dim": [16, None],
    "sliding_window": [7, None, 64],
    "use_sliding_window": [True],
    "max_window_layers": [0, 1],
    "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"],
    ["chunked_attention"] * 2,
                    ["attention"] * 2, ["full_attention"]],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0, **TRAINED},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0, **TRAINED},
        {**YARN, "rope_theta": 10000.0},
        {**YARN, "beta_fast": 8, "beta_slow": 2},
        {**YARN, "beta_fast": 1, "beta_slow": 32},
        {**YARN, "beta_fast": 4, "beta_slow": 4},
        {**YARN, "truncate": False},
        {**YARN, "original_max_position_embeddings": 2},
        {**YARN, "attention_factor": 0.5},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         **TRAINED},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, **TRAINED},
        {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
    ],
    "n_positions": [48],
    "n_embd": [48],
    "n_layer": [1, 3],
    "n_head": [2],
    "n_inner": [24],
    "activation_function": ["relu", "gelu", "gelu_pytorch_tanh"],
    "layer_norm_epsilon": [1e-2],
    "scale_attn_weights": [False],
    "scale_attn_by_inverse_layer_idx": [True],
    "add_cross_attention": [True],
    "is_encoder_decoder": [True],
}  # fmt: skip

# keys that the classes do not list, most of them of other families
FOREIGN: dict[str, list[Any]] = {
    "per_layer_config": [{}, {"0": {"intermediate_size": 24}}],
    "is_causal": [False, True],
    "use_bidirectional_attention": [True, False],
    "rope_scaling": [{"type": "linear", "factor": 2.0}],
    "sliding_window": [7, None, 64],
    "layer_types": [["full_attention"] * 2, ["full_attention", "sliding_attention"],
    ["chunked_attention"] * 2],
    "logit_scale": [0.5], "final_logit_softcapping": [30.0], "attention_multiplier": [0.1],
    "use_qk_norm": [True],
    "attention_chunk_size": [8], "num_local_experts": [4], "rope_interleaved": [True],
    "parallel_attn": [True],
    "alibi": [True], "something_unheard_of": [1], "partial_rotary_factor": [0.5],
    "rope_theta": [300.0],
}  # fmt: skip


def names_of(model_type: str) -> set[str]:
    """Every field of a configuration class."""
    return {each.name for each in fields(transformers.AutoConfig.for_model(model_type))}


def raw_of(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **(GPT2 if model_type == "gpt2" else SMALL), **changes}


def their_model(raw: dict[str, Any], folder: Path) -> Any:
    """The original of a config.json, seeded; None where it refuses the config itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        config.return_dict = True
        model = (
            transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            .float()
            .eval()
        )
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.2)
            model(torch.arange(5)[None])
    except Exception:  # whatever it raises for a config that it does not take
        return None
    return model


def _cloned(model: Any) -> dict[str, torch.Tensor]:
    """A tied head counts as a tensor of its own, as PyTorch files have it."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal_or_named(raw: dict[str, Any], key: str, folder: Path) -> str:
    """ "equal", "refused", or what is wrong."""
    try:
        warnings = config_warnings(raw)
    except CheckpointError as error:
        text = check_one_line(error)
        return "refused" if key in text else f"refused without its name: {text}"
    model = their_model(raw, folder)
    if model is None:
        return (
            "warned" if any(key in line for line in warnings) else "taken, but not by the original"
        )
    loop = engine(save_raw(folder, _cloned(model), raw), folder / "e")
    ids = torch.randint(0, 60, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    off = float((TeacherForcedScorer(loop).compute_logits([ids])[0] - expected).abs().max())
    return "equal" if off < 1e-4 else f"off by {off:.2g}"


@pytest.mark.parametrize("model_type", TYPES)
def test_every_field_is_tried(model_type: str) -> None:
    """A field that a later version of the classes brings has to be looked at."""
    assert names_of(model_type) <= {*IDLE, *TOLD}


@pytest.mark.parametrize("model_type", TYPES)
def test_fields_that_change_nothing_say_nothing(model_type: str, tmp_path: Path) -> None:
    raw = raw_of(
        model_type, **{key: value for key, value in IDLE.items() if key in names_of(model_type)}
    )
    assert equal_or_named(raw, "", tmp_path) == "equal"
    assert config_warnings(raw) == []


# transformers fails where these are null; a size for null is what its other classes take
MORE = {
    ("mistral", "num_key_value_heads=None"),
    ("qwen2", "head_dim=None"),
    ("qwen3", "head_dim=None"),
}


@pytest.mark.parametrize("model_type", TYPES)
def test_other_values_are_computed_or_refused_by_name(model_type: str, tmp_path: Path) -> None:
    wrong = {}
    # one code for all four
    here = names_of(model_type) - (
        {"rope_parameters"} if model_type in ("mistral", "qwen3") else set()
    )
    tried = {**FOREIGN, **{key: values for key, values in TOLD.items() if key in here}}
    for key, values in tried.items():
        for number, value in enumerate(values):
            outcome = equal_or_named(
                raw_of(model_type, **{key: value}), key, tmp_path / f"{key}-{number}"
            )
            if (
                outcome not in ("equal", "refused", "warned")
                and (model_type, f"{key}={value}") not in MORE
            ):
                wrong[f"{key}={value}"] = outcome
    assert not wrong
