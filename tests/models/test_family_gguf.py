"""The families' GGUFs, under the package gguf's names, as llama.cpp's converter leaves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, CorruptCheckpoint, UnknownArchitecture
from tests.models.all_families import CASES
from tests.models.delta_net_gguf import converted as delta_net_converted
from tests.models.family_cases import GgufCase, decoder_family, rms_facts
from tests.models.grouped_gguf import latent_as_converted, latent_facts, stacked

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from tests.models.family_gguf import (
    check_gguf,
    kept_integers,
    with_changes,
    write_broken,
    write_gguf,
)

WITH_GGUF = [name for name, case in CASES.items() if case.gguf is not None]


@pytest.mark.parametrize("name", WITH_GGUF)
def test_a_gguf_is_accepted_and_computes_the_same(name: str, tmp_path: Path) -> None:
    check_gguf(CASES[name], tmp_path)


def test_baichuan_with_40_layers_has_alibi(tmp_path: Path) -> None:
    """As llama.cpp tells 13B; the rows of q and k are in interleaved order there, too."""
    case = CASES["baichuan"]
    assert case.gguf is not None
    changes = {"max_position_embeddings": None, "model_max_length": 256, "num_hidden_layers": 40}

    def facts(raw: dict[str, Any]) -> dict[str, Any]:
        return {"attention.layer_norm_rms_epsilon": 1e-6, "context_length": raw["model_max_length"]}

    check_gguf(replace(case, gguf=replace(case.gguf, changes=changes, facts=facts)), tmp_path)
    config = open_checkpoint(tmp_path / "model.gguf").config
    assert (config["model_type"], config["model_max_length"]) == ("baichuan", 256)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bias": True, "use_conv_bias": False, "n_groups": 1},
        {"expand": 4, "head_dim": 24, "conv_kernel": 3, "tie_word_embeddings": True},
    ],
)
def test_a_mamba2_with_other_switches(changes: dict[str, Any], tmp_path: Path) -> None:
    check_gguf(with_changes("mamba2", changes), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": 0, "mamba_n_groups": 2, "mamba_conv_bias": False},
        {"position_embedding_type": "rope", "attention_bias": True, "mamba_proj_bias": True},
    ],
)
def test_a_granite_4_with_other_switches(changes: dict[str, Any], tmp_path: Path) -> None:
    check_gguf(with_changes("granitemoehybrid", changes), tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "missing"),
    [
        ("mamba2", {"n_groups": 1}, ["ssm.group_count"]),
        (
            "granitemoehybrid",
            {
                "attention_multiplier": 12**-0.5, "embedding_multiplier": 1.0,
                "residual_multiplier": 1.0, "logits_scaling": 1.0,
            },
            ["embedding_scale", "residual_scale", "logit_scale", "attention.scale"],
        ),
    ],
)  # fmt: skip
def test_keys_that_have_a_default(
    name: str, changes: dict[str, Any], missing: list[str], tmp_path: Path
) -> None:
    """Also the reference computes without them."""
    case = with_changes(name, changes)
    assert case.gguf is not None
    facts = case.gguf.facts
    own = replace(case.gguf, facts=lambda raw: {**facts(raw), **dict.fromkeys(missing)})
    check_gguf(replace(case, gguf=own), tmp_path)


@pytest.mark.parametrize(
    "kv_heads",
    [2, [2, 2], [0, 0], [0, 2, 0], [0, -2], ["a", "b"], [float("nan"), 0.0]],
)
def test_kv_heads_of_a_hybrid_that_do_not_fit(kv_heads: Any, tmp_path: Path) -> None:
    path = write_broken("granitemoehybrid", {"attention.head_count_kv": kv_heads}, tmp_path)
    with pytest.raises(CorruptCheckpoint, match="head_count_kv must have a number for each"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("ssm.inner_size", 100, "no multiple of embedding_length 48"),
        ("ssm.time_step_rank", 7, "and of the 7 heads"),
        ("ssm.state_size", 0, "ssm.state_size is 0"),
        ("ssm.conv_kernel", None, "ssm.conv_kernel is missing"),
    ],
)
def test_sizes_of_a_state_that_do_not_fit(
    key: str, value: int | None, words: str, tmp_path: Path
) -> None:
    path = write_broken("mamba2", {key: value}, tmp_path)
    with pytest.raises((CorruptCheckpoint, UnknownArchitecture), match=words):
        open_checkpoint(path)


def test_an_older_gguf_of_deepseek_has_one_up_projection(tmp_path: Path) -> None:
    case = CASES["deepseek_v2"]
    assert case.gguf is not None

    def facts(raw: dict[str, Any]) -> dict[str, Any]:
        older = latent_facts(raw, 1)
        for part in ("key", "value"):
            older[f"attention.{part}_length"] = older.pop(f"attention.{part}_length_mla")
        return older | {"attention.head_count_kv": raw["num_attention_heads"]}

    older = replace(case.gguf, facts=facts, tensors=stacked)
    check_gguf(replace(case, gguf=older), tmp_path)


@pytest.mark.parametrize("part", ["k_b_proj", "v_b_proj"])
def test_up_projections_that_do_not_fit_are_refused(part: str, tmp_path: Path) -> None:
    case = CASES["deepseek_v2"]
    assert case.gguf is not None
    case.save(tmp_path / "hf", **case.gguf.changes)

    def tensors(raw: dict[str, Any], read: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = latent_as_converted(raw, read)
        return {n: t[:-1].contiguous() if part in n else t for n, t in out.items()}

    path = tmp_path / "model.gguf"
    broken = replace(case.gguf, tensors=tensors)
    write_gguf(path, tmp_path / "hf", case.raw(**case.gguf.changes), broken)
    with pytest.raises(CorruptCheckpoint, match="attn_k_b"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "value_dim"),
    [("qwen3_5_text", 32), ("qwen3_5_moe_text", 32), ("qwen3_5_text", 16)],
)
def test_integers_of_heads_that_are_tiled_are_kept(
    name: str, value_dim: int, tmp_path: Path
) -> None:
    """Blocks of 32 columns change places with the heads of values, as rows do."""
    case = CASES[name]
    assert case.gguf is not None
    sizes = {**case.gguf.changes, "hidden_size": 64, "linear_value_head_dim": value_dim}
    sizes |= {"linear_num_value_heads": 4, "intermediate_size": 96}
    if "moe" in name:
        sizes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
        sizes["intermediate_size"] = None
    quantized = kept_integers(case, sizes, tmp_path)
    assert "layers.0.attn.in_proj" in quantized
    assert ("layers.0.attn.out_proj" in quantized) == (value_dim == 32)


def test_an_older_gguf_of_qwen3_next_has_one_projection(tmp_path: Path) -> None:
    """And the layers' types one by one, and the experts' gate and up in one tensor."""
    case = CASES["qwen3_next"]
    assert case.gguf is not None
    own_facts = case.gguf.facts

    def facts(raw: dict[str, Any]) -> dict[str, Any]:
        types = {"attention.recurrent_layers": [True, True, False]}
        return {**own_facts(raw), **types, "full_attention_interval": None}

    def tensors(raw: dict[str, Any], read: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = delta_net_converted(raw, read)
        for layer in range(raw["num_hidden_layers"]):
            stem = f"model.layers.{layer}.mlp.experts"
            parts = [out.pop(f"{stem}.{part}_proj.weight") for part in ("gate", "up")]
            out[f"blk.{layer}.ffn_gate_up_exps.weight"] = torch.cat(parts, 1)
        return out

    check_gguf(replace(case, gguf=replace(case.gguf, facts=facts, tensors=tensors)), tmp_path)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"ssm.inner_size": 49}, "ssm.inner_size 49 for the 6 heads"),
        ({"ssm.group_count": 4}, "4 heads of ssm.group_count do not divide the 6"),
        ({"ssm.state_size": 11}, "which is not divided into"),
        ({"nextn_predict_layers": 4}, "has 0 layers beside 4 that predict"),
        ({"attention.recurrent_layers": [1, 0]}, "must have 0 or 1 for each of the 3 layers"),
        ({"attention.recurrent_layers": [1, 0, 2, 0]}, "must have 0 or 1 for each"),
        ({"expert_weights_norm": False}, "expert_weights_norm is false"),
    ],
)
def test_keys_of_a_delta_net_that_do_not_fit(
    broken: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_broken("qwen3_5_moe_text", broken, tmp_path)
    with pytest.raises((CorruptCheckpoint, UnknownArchitecture), match=words):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_layers_behind_the_counted_ones_are_not_ignored(name: str, tmp_path: Path) -> None:
    """Layers that only predict are counted; a file with more has another header than tensors."""
    case = CASES[name]
    assert case.gguf is not None
    make, raw = case.gguf.tensors, case.raw(**case.gguf.changes)
    assert make is not None
    case.save(tmp_path / "hf", **case.gguf.changes)
    counted = case.gguf.facts(raw).get("block_count", raw["num_hidden_layers"])
    more = {f"blk.{counted}.attn_norm.weight": torch.ones(raw["hidden_size"])}
    own = replace(case.gguf, tensors=lambda raw, read: {**make(raw, read), **more})
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", raw, own)
    with pytest.raises(CheckpointError, match=rf"no place for: .*layers\.{counted}\."):
        make_build_plan(open_checkpoint(tmp_path / "model.gguf"), BuildConfig(dtype="float32"))


def test_a_nemotron_h_without_experts(tmp_path: Path) -> None:
    case = with_changes(
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "mlp_bias": True},
    )
    assert case.gguf is not None
    check_gguf(replace(case, gguf=replace(case.gguf, architecture="nemotron_h")), tmp_path)


@pytest.mark.parametrize(
    ("name", "broken", "words"),
    [
        ("nemotron_h", {"feed_forward_length": [0, 32]}, "feed_forward_length must have a number"),
        ("nemotron_h", {"attention.head_count_kv": [0, 0, -2, 0]}, "head_count_kv must have a num"),
        ("nemotron_h", {"ssm.inner_size": 97}, "ssm.inner_size 97 is no multiple of the 8 heads"),
        ("nemotron_h", {"expert_gating_func": 1}, "scores of nemotron_h_moe are sigmoids"),
        ("hy_v3", {"expert_gating_func": 1}, "scores of hy_v3 are sigmoids"),
        ("hy_v3", {"expert_shared_feed_forward_length": 41}, "no multiple of an expert's 40"),
        ("lfm2_moe", {"expert_gating_func": 1}, "scores of lfm2moe are sigmoids"),
        (
            "mellum",
            {"attention.sliding_window_pattern": [1, 2, 0]},
            "must have true or false",
        ),
        ("olmo3", {"attention.sliding_window_pattern": [1, 2, 0]}, "must have true or false"),
        ("olmo", {"attention.layer_norm_epsilon": 1e-3}, "olmo.attention.layer_norm_epsilon is"),
        ("gpt_bigcode", {"attention.head_count_kv": 4}, "head_count_kv is 4.*one key and value"),
        ("phi3", {"rope.dimension_count": 8}, "rope_factors_long.weight has .6.*4 frequencies"),
        ("phi3", {"rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor is 2, which modelmill"),
        ("olmo", {"attention.clamp_kqv": [1.0, 2.0]}, "clamp_kqv is .1. 2"),
        ("phi3", {"attention.sliding_window": [1, 2]}, "sliding_window is .1 2"),
        ("ministral3", {"rope.scaling.yarn_log_multiplier": [1.0, 2.0]}, "yarn_log_multiplier is"),
        ("ministral3", {"rope.scaling.type": "linear"}, "temperature_scale without a scaling of"),
    ],
)
def test_keys_of_the_newest_families_that_do_not_fit(
    name: str, broken: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_broken(name, broken, tmp_path)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


@pytest.mark.parametrize("missing", ["long", "short"])
def test_a_phi3_with_one_list_of_factors(missing: str, tmp_path: Path) -> None:
    case = CASES["phi3"]
    assert case.gguf is not None
    make = case.gguf.tensors
    assert make is not None
    name = f"rope_factors_{missing}.weight"

    def without(raw: dict[str, Any], read: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value for key, value in make(raw, read).items() if key != name}

    case.save(tmp_path / "hf")
    own = replace(case.gguf, tensors=without)
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", case.raw(), own)
    with pytest.raises(CheckpointError, match=f"has no {name} beside"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "changes", "facts"),
    [
        (
            "phi3",
            {"rope_scaling": None, "hidden_size": 64, "partial_rotary_factor": 0.75,
             "sliding_window": 9, "original_max_position_embeddings": None,
             "tie_word_embeddings": True},
            {"rope.dimension_count": 12, "attention.sliding_window": 9,
             "rope.scaling.original_context_length": 4096, "rope.scaling.attn_factor": None},
        ),
        (
            "phi3",  # the list of longer texts
            {"original_max_position_embeddings": 32, "max_position_embeddings": 64},
            {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.2**0.5},
        ),
        ("olmo", {"clip_qkv": None}, {"attention.clamp_kqv": None}),
        ("cohere", {"use_qk_norm": True, "attention_bias": True}, {}),
        ("arcee", {"attention_bias": True, "mlp_bias": True}, {}),
        ("nemotron", {"mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 3.0}},
         {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}),
        ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "attention_bias": False}, {}),
    ],
)  # fmt: skip
def test_other_files_of_dense_families(
    name: str, changes: dict[str, Any], facts: dict[str, Any], tmp_path: Path
) -> None:
    case = with_changes(name, changes)
    assert case.gguf is not None
    own, make = case.gguf.facts, case.gguf.tensors

    def tensors(raw: dict[str, Any], read: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = read if make is None else make(raw, read)
        scaled = raw.get("rope_scaling") is not None
        return {key: each for key, each in made.items() if scaled or "rope_factors" not in key}

    changed = replace(case.gguf, facts=lambda raw: own(raw) | facts, tensors=tensors)
    check_gguf(replace(case, gguf=changed), tmp_path)


def test_a_mistral3_whose_queries_do_not_grow_is_a_mistral(tmp_path: Path) -> None:
    gguf_case = GgufCase("mistral3", rms_facts, permuted=True, changes={"rms_norm_eps": 1e-5})
    check_gguf(decoder_family("mistral", {}, (), {}, {}, gguf=gguf_case), tmp_path)


def test_experts_of_projected_tokens_are_refused(tmp_path: Path) -> None:
    path = write_broken("nemotron_h", {"moe_latent_size": 24}, tmp_path)
    with pytest.raises(CheckpointError, match="moe_latent_size"):
        make_build_plan(open_checkpoint(path), BuildConfig(dtype="float32"))


def test_the_context_length_of_a_hunyuan_without_scaling_is_no_unknown_key(tmp_path: Path) -> None:
    """The converter writes it into every file; the rotation's base has the scaling in it."""
    path = write_broken("hunyuan_v1_dense", {"rope.scaling.what": 1}, tmp_path)
    (warning,) = make_build_plan(open_checkpoint(path), BuildConfig(dtype="float32")).warnings
    assert "hunyuan-dense.rope.scaling.what is a key that is not read" in warning


@pytest.mark.parametrize("values", [[0.5], [1, 2], ["a", "b"], [0.5, float("nan")]])
def test_numbers_of_an_activation_that_do_not_fit(values: list[Any], tmp_path: Path) -> None:
    case = CASES["apertus"]
    assert case.gguf is not None
    numbers = case.gguf.numbers
    assert numbers is not None
    case.save(tmp_path / "hf")
    own = replace(case.gguf, numbers=lambda tensors: {**numbers(tensors), "xielu.beta": values})
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", case.raw(), own)
    with pytest.raises(CorruptCheckpoint, match=r"xielu\.beta must have a number for each"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("phimoe", "noise of its router"), ("mistral4", "how much queries grow")],
)
def test_what_a_file_lacks_is_the_reason_to_refuse_it(
    architecture: str, words: str, tmp_path: Path
) -> None:
    """llama.cpp writes them, and computes something else than the models."""
    case = CASES["granitemoe"]
    assert case.gguf is not None
    case.save(tmp_path / "hf", **case.gguf.changes)
    own = replace(case.gguf, architecture=architecture, tensors=lambda raw, read: {})
    write_gguf(tmp_path / "model.gguf", tmp_path / "hf", case.raw(**case.gguf.changes), own)
    with pytest.raises(UnknownArchitecture, match=f"{words}.*Hugging Face folder"):
        open_checkpoint(tmp_path / "model.gguf")
