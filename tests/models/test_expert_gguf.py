"""GGUFs of families with experts, and Granite: kept integers, other values of keys, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept.reference import open_reference
from modelmill.accept.reference.gguf_config import config_from_gguf
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, UnknownArchitecture
from tests.models.all_families import CASES
from tests.models.family_cases import NULL

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import gguf

from tests.models.family_gguf import (
    add_facts,
    check_gguf,
    check_gguf_with,
    kept_integers,
    with_changes,
    write_broken,
)

BLOCKS_OF_32 = {
    "granitemoe": {},
    "granitemoehybrid": {"shared_intermediate_size": 64, "num_hidden_layers": 2},
    "granitemoeshared": {"shared_intermediate_size": 64},
    "dots1": {},
    "ernie4_5_moe": {"intermediate_size": 64, "moe_intermediate_size": 32},
    "exaone_moe": {"moe_intermediate_size": 32},
    "minimax_m2": {"head_dim": 16},
    "sarvam_moe": {"moe_intermediate_size": 32, "head_dim": 16},
    "solar_open": {"moe_intermediate_size": 32, "head_dim": 16},
    "glm4_moe_lite": {
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 32),
        "moe_intermediate_size": 32,
    },
}
"""Sizes of families with experts whose rows are blocks of Q8_0."""


@pytest.mark.parametrize("name", BLOCKS_OF_32)
def test_integers_of_experts_are_kept(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert case.gguf is not None
    sizes = {"hidden_size": 64, "intermediate_size": 96, **case.gguf.changes, **BLOCKS_OF_32[name]}
    quantized = kept_integers(case, sizes, tmp_path)
    experts = {f"layers.1.mlp.experts.2.{part}_proj" for part in ("gate_up", "down")}
    assert experts <= quantized


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dots1", {"norm_topk_prob": False, "attention_bias": True}),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0, "tie_word_embeddings": False}),
        ("exaone_moe", {"sliding_window_pattern": 3, "n_group": 1, "topk_group": 1}),
        ("minimax_m2", {"rotary_dim": 12, "tie_word_embeddings": True}),
        ("granitemoeshared", {"attention_bias": True, "tie_word_embeddings": True}),
        ("solar_open", {"attention_bias": True, "n_shared_experts": 2}),
        # with groups, and half of each head rotated: Ling 2.0
        ("sarvam_moe", {"n_group": 4, "topk_group": 2, "attention_bias": True}),
        ("granite_swa", {"layer_rope_theta": None, "attention_bias": True}),
        ("youtu", {"q_lora_rank": NULL, "tie_word_embeddings": False}),
    ],
)
def test_other_switches(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_gguf(with_changes(name, changes), tmp_path)


SCALINGS = {
    "linear": {"type": "linear", "factor": 3.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("solar_open", "yarn"), ("granitemoeshared", "linear"), ("ernie4_5_moe", "linear"),
        ("dots1", "yarn"), ("granite_swa", "yarn"), ("granite", "yarn"), ("glm4", "linear"),
        ("starcoder2", "yarn"), ("stablelm", "linear"),
    ],
)  # fmt: skip
def test_scaled_positions(name: str, scaling: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"rope_scaling": SCALINGS[scaling], "layer_rope_theta": None}
    case = with_changes(name, changes)
    assert case.gguf is not None
    facts, key = case.gguf.facts, "original_max_position_embeddings"
    own = {
        "rope.scaling.type": scaling,
        "rope.scaling.factor": SCALINGS[scaling]["factor"],
        "rope.scaling.original_context_length": SCALINGS[scaling].get(key),
    }
    scaled = replace(case.gguf, facts=lambda raw: {**facts(raw), **own})
    check_gguf(replace(case, gguf=scaled), tmp_path)


@pytest.mark.parametrize(
    ("name", "period", "pattern"), [("exaone4", 4, None), ("exaone4", 2, 2), ("exaone_moe", 2, 2)]
)
def test_every_nth_layer_has_no_window(
    name: str, period: int, pattern: int | None, tmp_path: Path
) -> None:
    """Where the file has no list; every fourth, where it has no number either."""
    dense = ["dense", *["sparse"] * 3] if name == "exaone_moe" else None
    layers = {"num_hidden_layers": 4, "mlp_layer_types": dense}
    case = with_changes(name, {**layers, "sliding_window_pattern": period})
    check_gguf_with(case, {"attention.sliding_window_pattern": pattern}, tmp_path)


@pytest.mark.parametrize(("name", "period"), [("granite_swa", 2), ("olmo3", 2), ("olmo3", None)])
def test_a_period_in_the_place_of_a_list(name: str, period: int | None, tmp_path: Path) -> None:
    """Of families whose converter writes a list; the second reading knows a number, too."""
    types = ["sliding_attention"] * 4
    types[(period or 4) - 1 :: period or 4] = ["full_attention"] * (4 // (period or 4))
    changes = {"num_hidden_layers": 4, "layer_types": types}
    case = with_changes(name, changes | ({} if name == "olmo3" else {"layer_rope_theta": None}))
    check_gguf_with(case, {"attention.sliding_window_pattern": period}, tmp_path)


@pytest.mark.parametrize("name", ["granite", "granite_swa"])
def test_a_scaling_without_a_type_is_linear(name: str, tmp_path: Path) -> None:
    """As in llama.cpp."""
    case = with_changes(name, {"rope_scaling": {"type": "linear", "factor": 3.0}})
    check_gguf_with(case, {"rope.scaling.factor": 3.0}, tmp_path)


def test_metadata_that_acceptance_alone_reads_is_one_line(tmp_path: Path) -> None:
    """The builder names the key as one without effect."""
    path = write_broken("granitemoeshared", {"attention.sliding_window": "x"}, tmp_path)
    with pytest.raises(CorruptCheckpoint, match=r"acceptance cannot read .* convert the model"):
        open_reference(open_checkpoint(path))


@pytest.mark.parametrize(
    ("gating", "name"),
    [(1, "dots1"), (2, "ernie4_5_moe"), (1, "exaone_moe"), (1, "minimax_m2"), (1, "solar_open")],
)
def test_other_scores_of_experts_are_refused(gating: int, name: str, tmp_path: Path) -> None:
    path = write_broken(name, {"expert_gating_func": gating}, tmp_path)
    scores = "sigmoids" if gating == 1 else "a softmax"
    with pytest.raises(UnknownArchitecture, match=rf"func is {gating}; the .* are {scores}"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "broken", "words"),
    [
        ("ernie4_5_moe", {"expert_shared_feed_forward_length": 41}, "length 41, but expert_shared"),
        ("ernie4_5_moe", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0"),
        ("exaone_moe", {"attention.sliding_window": None}, "sliding_window is missing"),
        (
            "exaone_moe",
            {"attention.sliding_window_pattern": [True, False]},
            "must have true or false",
        ),
        ("granite_swa", {"attention.rope_pattern": [True, False]}, "must have true or false"),
        ("granite_swa", {"attention.rope_pattern": [["a"]] * 3}, "must have true or false"),
        ("granite_swa", {"rope.freq_base_swa": 77.0}, "freq_base_swa is 77"),
        ("exaone_moe", {"nextn_predict_layers": 4}, "has 4 layers, of which 4 only predict"),
        ("granite_swa", {"expert_count": 4}, "mixture of experts of architecture granite_swa"),
        ("kimi_k2", {"expert_gating_func": 3}, "expert_gating_func is 3, which is not known"),
        ("kimi_k2", {"expert_count": 0}, "leaves layers with experts, but .* is missing"),
        ("kimi_k2", {"expert_count": None}, "leaves layers with experts, but .* is missing"),
    ],
)
def test_keys_that_do_not_fit(
    name: str, broken: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_broken(name, broken, tmp_path)
    with pytest.raises((CorruptCheckpoint, UnknownArchitecture), match=words):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("ernie4_5_moe", "expert_weights_scale", 2.5),
        ("kimi_k2", "attention.temperature_scale", 0.1),  # Mistral Large 3
        ("granitemoeshared", "expert_gating_func", 2),
        ("minimax_m2", "expert_group_count", 4),
        ("olmo", "expert_weights_scale", [1.0, 2.0]),
    ],
)
def test_keys_of_what_is_not_computed_are_refused(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    path = write_broken(name, {key: value}, tmp_path)
    with pytest.raises(CheckpointError, match=key):
        make_build_plan(open_checkpoint(path), BuildConfig(dtype="float32"))


@pytest.mark.parametrize(
    ("layers", "vocabulary", "family"),
    [(47, 154880, "deepseek_v3"), (47, 154879, "deepseek_v2"), (46, 154880, "deepseek_v2")],
)
def test_the_sigmoids_of_glm_4_7_flash_need_no_key(
    layers: int, vocabulary: int, family: str, tmp_path: Path
) -> None:
    """Its converter writes none, and llama.cpp tells it by its sizes; for others it is softmax."""
    case = CASES["glm4_moe_lite"]
    assert case.gguf is not None
    raw = case.raw(**case.gguf.changes, num_hidden_layers=layers)
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "deepseek2")
    sizes = {"embedding_length": 1, "feed_forward_length": 80, "attention.head_count": 4,
             "context_length": 256, "vocab_size": vocabulary}  # fmt: skip
    facts = {**case.gguf.facts(raw), **sizes}
    del facts["expert_gating_func"]
    add_facts(writer, facts)
    writer.add_tensor("token_embd.weight", torch.zeros(vocabulary, 1).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.config["model_type"] == family
    assert config_from_gguf(checkpoint.raw_container)["model_type"] == family
