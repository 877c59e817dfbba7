"""Several fields of a config.json at once: the independent logits, or one line that says no.

``test_dense_families.py`` changes one field at a time; some values are wrong only beside another.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from modelmill.core.config import RunConfig
from modelmill.core.errors import CheckpointError
from modelmill.core.module_lookup import import_module_if_exists
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import build_and_accept
from tests.models.all_families import CASES
from tests.models.config_keys import config_warnings
from tests.models.family_cases import NULL
from tests.models.saved_family import (
    Saved,
    compare,
    drawn_ids,
    label,
)
from tests.trust.error_lines import check_one_line

pytest.importorskip("transformers")

SEEDS = 3
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
EXACT_YARN = YARN | {"truncate": False}
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
HALF = {"rope_type": "default", "partial_rotary_factor": 0.5}
LATENT_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "mscale_all_dim": 1.0}
LATENT_LINEAR = {"type": "linear", "factor": 4.0, "mscale_all_dim": 0.5}
OFF_BUT_LISTED = {"layer_types": [SLIDING, FULL], "num_hidden_layers": 2, "sliding_window": 20}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "windows listed, and not switched on": ("smollm3", OFF_BUT_LISTED, "layer_types"),
    "windows listed, and switched off": (
        "smollm3", OFF_BUT_LISTED | {"use_sliding_window": False}, "use_sliding_window",
    ),
    "windows listed, of no size": (
        "smollm3",
        OFF_BUT_LISTED | {"use_sliding_window": True, "sliding_window": None},
        "sliding_window",
    ),
    "sums by training ranks": (
        "bloom", {"pretraining_tp": 4, "slow_but_exact": True}, "slow_but_exact=True",
    ),
    "a factor of yarn, dynamic": (
        "deepseek_v3", {"rope_scaling": LATENT_DYNAMIC}, "mscale_all_dim=1.0",
    ),
    "a factor of yarn, linear": (
        "deepseek_v2", {"rope_scaling": LATENT_LINEAR}, "mscale_all_dim=0.5",
    ),
    "yarn by layer type, not rounded": (
        "olmo3",
        {"rope_parameters": {FULL: EXACT_YARN | {"rope_theta": 500.0}, SLIDING: PLAIN}},
        "rope_parameters.full_attention.truncate=False",
    ),
    "a type under its old name, Gemma 3": (
        "gemma3_text",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "rope_scaling.type='linear'",
    ),
    "a type under its old name, OLMo 3": (
        "olmo3", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.type='linear'",
    ),
    "yarn of full attention alone, not rounded": (
        "olmo3", {"rope_scaling": EXACT_YARN}, "rope_parameters.full_attention.truncate=False",
    ),
    "yarn of windows, not rounded": (
        "gemma3_text",
        {"rope_parameters": {FULL: PLAIN, SLIDING: EXACT_YARN | {"rope_theta": 500.0}}},
        "rope_parameters.sliding_attention.truncate=False",
    ),
    "a trained length outside of the rotation, Gemma 3": (
        "gemma3_text",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0},
         "original_max_position_embeddings": 16},
        "original_max_position_embeddings=16",
    ),
    "an odd number of channels, ChatGLM": ("chatglm", {"kv_channels": 17}, "kv_channels=17"),
    "another family's recurrence, Granite 4": (
        "granitemoehybrid",
        {"num_hidden_layers": 2, "layer_types": ["conv", "attention"]}, "layer_types names 'conv'",
    ),
    "another family's recurrence, LFM2": (
        "lfm2", {"num_hidden_layers": 2, "layer_types": ["mamba", "full_attention"]},
        "layer_types names 'mamba'",
    ),
    "no rotation of a layer type": (
        "gemma3_text", {"rope_parameters": {FULL: 5, SLIDING: PLAIN}}, "rope_parameters.full_att",
    ),
    "yarn of Gemma 4, not rounded": (
        "gemma4_text",
        {"rope_parameters": {FULL: EXACT_YARN | {"rope_theta": 500.0}, SLIDING: PLAIN}},
        "rope_parameters.full_attention.truncate=False",
    ),
    **{
        f"no base of a layer type's rotation, {name}": (
            name,
            {"rope_parameters": {FULL: PLAIN, SLIDING: {"rope_type": "default"}}},
            "rope_parameters.sliding_attention needs a rope_theta",
        )
        for name in ("lfm3", "mellum", "gemma4_text")
    },
    "two counts of experts, ERNIE 4.5": (
        "ernie4_5_moe", {"moe_num_experts": 6, "num_experts": 4}, "num_experts=4",
    ),
    "two counts of chosen experts, ERNIE 4.5": (
        "ernie4_5_moe", {"moe_k": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3",
    ),
    "a null that is true where the key is absent": (
        "deepseek_v3", {"norm_topk_prob": NULL}, "norm_topk_prob is null",
    ),
    "attention without a gate": ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
    "a width by its name in the file": ("bloom", {"hidden_size": None, "n_embed": 0}, "n_embed"),
    "heads by their name in the file": (
        "gpt_bigcode", {"n_head": 5}, "n_head=5",
    ),
    "windows listed, of no size, Granite": (
        "granite_swa",
        {"sliding_window": NULL,
         "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        "sliding_window",
    ),
    "a scaling without its factors, Phi-3.5-MoE": (
        "phimoe", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling: 'linear'",
    ),
    "one of LongRoPE's factors, Phi-3.5-MoE": (
        "phimoe", {"rope_scaling": {"type": "longrope", "long_mscale": 1.2}}, "short_mscale",
    ),
    "a factor of the base, and a scaling": (
        "hunyuan_v1_dense", {"rope_scaling": {"type": "linear", "alpha": 3.0}}, "alpha",
    ),
    "two lists of layers, Nemotron-H": (
        "nemotron_h", {"hybrid_override_pattern": "MMMM"}, "hybrid_override_pattern",
    ),
    "heads that are no share of the width, GPT-NeoX": ("gpt_neox", {"head_dim": 8}, "head_dim=8"),
    "heads that are no share of the width, StableLM": ("stablelm", {"head_dim": 8}, "head_dim=8"),
    "heads that are no share of the width, Falcon": ("falcon", {"head_dim": 8}, "head_dim=8"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_do_not_go_together_are_one_line(name: str) -> None:
    model_type, changes, words = REFUSED[name]
    with pytest.raises(CheckpointError) as error:
        config_warnings(CASES[model_type].raw(**changes))
    line = check_one_line(error.value)
    assert line.startswith("config.json: ")
    assert words in line


WINDOWS = [20, 20, None, 20]
"""What four layers of ``every n-th has full attention`` would be for a pattern of 3."""


@pytest.mark.parametrize("model_type", ["olmo3", "gemma2", "gpt_oss"])
def test_a_pattern_of_windows_that_the_class_does_not_have_has_no_effect(model_type: str) -> None:
    family = import_module_if_exists("modelmill.models", model_type)
    assert family is not None
    raw = CASES[model_type].raw(num_hidden_layers=4, sliding_window=20, sliding_window_pattern=3)
    plain = CASES[model_type].raw(num_hidden_layers=4, sliding_window=20)
    windows = list(family.config_from_hf(raw).windows)
    assert windows == list(family.config_from_hf(plain).windows) != WINDOWS
    assert any("sliding_window_pattern" in line for line in config_warnings(raw))


@pytest.mark.parametrize("model_type", ["gpt_oss", "cwm", "apertus", "lfm3"])
def test_a_null_rotation_is_that_of_the_class(model_type: str) -> None:
    family = import_module_if_exists("modelmill.models", model_type)
    assert family is not None
    null, absent = (CASES[model_type].raw(rope_parameters=each) for each in (NULL, None))
    assert family.config_from_hf(null) == family.config_from_hf(absent)
    assert family.config_from_hf(null).rope.scaling_type != "default"


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_published_keys_of_qwen3_5_that_change_nothing_say_nothing(model_type: str) -> None:
    published = {
        "attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }  # fmt: skip
    assert config_warnings(CASES[model_type].raw(**published)) == []


def test_published_keys_of_lfm2_that_change_nothing_say_nothing() -> None:
    published = {
        "block_dim": 48, "block_mlp_init_scale": 1.0, "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True,
        "conv_dim": 48, "conv_dim_out": 48, "conv_use_xavier_init": True, "num_heads": 4,
        "use_pos_enc": True,
    }  # fmt: skip
    assert config_warnings(CASES["lfm2"].raw(**published)) == []


@pytest.mark.parametrize("model_type", ["gpt_neox", "stablelm", "falcon"])
def test_a_head_size_that_the_width_says_too_is_read(model_type: str) -> None:
    width = CASES[model_type].base["hidden_size"] // CASES[model_type].base["num_attention_heads"]
    assert config_warnings(CASES[model_type].raw(head_dim=width)) == []


ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "odd heads, BLOOM": ("bloom", {"hidden_size": 28, "n_head": 4}),
    "odd heads, MPT": ("mpt", {"d_model": 21, "n_heads": 3}),
    "odd heads, OPT": ("opt", {"hidden_size": 28, "num_attention_heads": 4,
                               "word_embed_proj_dim": 28}),
    "latent attention by length": (
        "deepseek_v3",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16},
    ),
    "windows by length, full attention by a factor": (
        "olmo3",
        {"rope_parameters": {FULL: PLAIN | {"rope_type": "linear", "factor": 4.0},
                             SLIDING: PLAIN | {"rope_type": "dynamic", "factor": 4.0}},
         "max_position_embeddings": 16},
    ),
    "groups of experts that the method does not read": (
        "deepseek_v2", {"topk_method": "greedy", "n_group": 4, "topk_group": 2},
    ),
    "GPT-NeoX by other families' names": (
        "gpt_neox", {"rope_theta": 300.0, "partial_rotary_factor": 0.5, "rotary_pct": 1.0},
    ),
    "a part of each head, by YaRN": ("minimax_m2", {"rope_parameters": YARN}),
    "a part of each head that no head has, Command R": ("cohere", {"rope_parameters": HALF}),
    "a part of each head that no head has, ERNIE 4.5": ("ernie4_5_moe", {"rope_parameters": HALF}),
    "a trained length outside of the rotation": (
        "ministral3", {"original_max_position_embeddings": 20},
    ),
    "experts by other families' names": (
        "ernie4_5_moe", {"moe_k": None, "num_experts_per_tok": 3},
    ),
    "no window below layer 0": (
        "qwen2_moe", {"max_window_layers": 0, "use_sliding_window": True, "sliding_window": 5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_acceptance_computes_the_same(name: str, tmp_path: Path) -> None:
    model_type, changes = ACCEPTED[name]
    logits = CASES[model_type].save(tmp_path / "hf", **changes)
    report, written = build_and_accept(tmp_path / "hf", tmp_path / "e", "float32", "none")
    assert written, report.get("reason", report)
    config = RunConfig(device="cpu", max_num_batched_tokens=32, kv_cache_bytes=1 << 22)
    vocab = int(CASES[model_type].raw(**changes)["vocab_size"])
    compare(EngineCore.open(tmp_path / "e", config), logits, drawn_ids(vocab, (7, 33)), (None,))


def test_a_window_of_null_is_full_attention(tmp_path: Path) -> None:
    """transformers makes no mask without a size, so it gets full attention by another key."""
    full = {"layer_types": ["full_attention"] * 3}
    logits = CASES["granite_swa"].save(tmp_path / "hf", **full)
    raw = CASES["granite_swa"].raw(sliding_window=NULL)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(raw))
    report, written = build_and_accept(tmp_path / "hf", tmp_path / "e", "float32", "none")
    assert written, report.get("reason", report)
    config = RunConfig(device="cpu", max_num_batched_tokens=32, kv_cache_bytes=1 << 22)
    compare(EngineCore.open(tmp_path / "e", config), logits, drawn_ids(120, (7, 33)), (None,))


NULLS: dict[str, tuple[str, ...]] = {
    "granite": ("rms_norm_eps", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
    "falcon_h1": ("rms_norm_eps", "mamba_expand", "key_multiplier", "lm_head_multiplier"),
    "gpt_neo": ("layer_norm_epsilon", "window_size"),
    "hyperclovax": ("attention_multiplier", "embedding_multiplier", "logits_scaling"),
}


@pytest.mark.parametrize("name", NULLS, ids=label)
def test_acceptance_takes_a_null_for_an_absent_key(name: str, tmp_path: Path) -> None:
    """transformers refuses some of these nulls, so the checkpoint is saved without the keys."""
    CASES[name].save(tmp_path, **dict.fromkeys(NULLS[name]))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict.fromkeys(NULLS[name])))
    report, written = build_and_accept(tmp_path, tmp_path / "e", "float32", "none")
    assert written, report.get("reason", report)


def combination(name: str, seed: int) -> dict[str, Any]:
    """Some switches of a family, one behind the other."""
    draw = random.Random(f"{name} {seed}")
    merged: dict[str, Any] = {}
    for changes in draw.sample(CASES[name].switches, k=min(4, len(CASES[name].switches))):
        merged |= changes
    return merged


def outcome_of(name: str, changes: dict[str, Any], folder: Path) -> str:
    """ "equal", "refused", or "unjudged" where the independent implementation fails."""
    raw = CASES[name].raw(**changes)
    try:
        config_warnings(raw)
    except CheckpointError as error:
        line = check_one_line(error)
        assert any(key in line for key in re.findall(r"\w+", str(raw))), line
        return "refused"
    try:
        saved = Saved(CASES[name], folder, **changes)
        saved.logits([1, 2, 3])
    except CheckpointError as error:  # sizes that do not divide each other, at the first tensor
        check_one_line(error)
        return "refused"
    except (ValueError, TypeError, KeyError, RuntimeError):
        return "unjudged"
    compare(saved.open(), saved.logits, drawn_ids(raw["vocab_size"], (1, 33, 70)), (None, 37))
    return "equal"


@pytest.mark.parametrize("name", CASES, ids=label)
def test_switches_together(name: str, tmp_path: Path) -> None:
    """A few of them contradict each other; most are computed."""
    outcomes = [
        outcome_of(name, combination(name, seed), tmp_path / str(seed)) for seed in range(SEEDS)
    ]
    assert outcomes.count("equal") >= SEEDS - 1, outcomes
