"""No key of a config is ignored in silence: published files say nothing, strange keys are named or
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelmill.accept.reference import open_reference
from modelmill.artifact.store import open_artifact
from modelmill.builder import build_engine
from modelmill.builder.model_config import reject_or_warn_unread_keys
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import CheckpointError, TensorMismatch, UnknownArchitecture
from modelmill.core.module_lookup import import_module_if_exists
from modelmill.core.read_tracking_config import ReadTrackingConfig, with_config_defaults
from tests.checkpoint.checkpoint_factory import (
    LLAMA_CONFIG,
    llama_state,
    write_folder,
    write_llama_gguf,
)
from tests.models.config_keys import config_warnings
from tests.models.test_families import QWEN
from tests.trust.error_lines import check_one_line

FLOAT = BuildConfig(dtype="float32", target="cpu")


# as they lie on the hub (facts of the published files)
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2-medium": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1024,
        "n_head": 16, "n_layer": 24,
        "n_positions": 1024, "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "llama-2": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "llama-3.1": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        }, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True,
        "transformers_version": "4.42.3", "vocab_size": 128256,
    },
    "smollm2": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_cache": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3",
        "vocab_size": 49152,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True,
        "vocab_size": 32000,
    },
    "qwen2.5": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
        "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen-7b-chat": {
        "architectures": ["QWenLMHeadModel"], "attn_dropout_prob": 0.0, "bf16": False,
        "emb_dropout_prob": 0.0,
        "fp16": False, "fp32": False, "hidden_size": 4096, "intermediate_size": 22016,
        "initializer_range": 0.02,
        "kv_channels": 128, "layer_norm_epsilon": 1e-06, "max_position_embeddings": 8192,
        "model_type": "qwen",
        "no_bias": True, "num_attention_heads": 32, "num_hidden_layers": 32, "onnx_safe": None,
        "rotary_emb_base": 10000, "rotary_pct": 1.0, "scale_attn_weights": True, "seq_length": 8192,
        "tie_word_embeddings": False, "tokenizer_class": "QWenTokenizer",
        "transformers_version": "4.32.0",
        "use_cache": True, "use_dynamic_ntk": True, "use_flash_attn": "auto", "use_logn_attn": True,
        "vocab_size": 151936, "use_cache_quantization": False, "use_cache_kernel": False,
        "softmax_in_fp32": False,
        "auto_map": {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_say_nothing(name: str) -> None:
    assert config_warnings(PUBLISHED[name]) == []


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2.5", {"is_causal": False}, r"is_causal=False enables attention to later tokens"),
    ("llama-2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True enables"),
    ("llama-2", {"causal": False}, "causal=False enables"),
    ("llama-2", {"attn_type": "bidirectional"}, "attn_type='bidirectional' enables"),
    ("llama-2", {"sliding_window": 1024}, "sliding_window=1024"),
    ("llama-2", {"layer_types": ["sliding_attention"] * 32}, "layer_types names sliding_attention"),
    (
        "llama-2",
        {"layer_types": ["chunked_attention"] * 32},
        "layer_types names 'chunked_attention'",
    ),
    ("llama-2", {"layer_types": ["full_attention"] * 31}, "layer_types names 31 layers"),
    ("llama-2", {"per_layer_config": {"0": {"intermediate_size": 4}}}, "per_layer_config="),
    ("qwen2.5", {"layer_types": ["sliding_attention"] * 24}, "use_sliding_window is off"),
    ("qwen2.5", {"layer_types": ["linear_attention"] * 24}, "'linear_attention'"),
    (
        "mistral",
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 32},
        "sliding_window",
    ),
    (
        "gpt2-medium",
        {"num_hidden_layers": 12},
        "n_layer=24 and num_hidden_layers=12 mean the same and contradict",
    ),
    ("gpt2-medium", {"num_attention_heads": 12}, "n_head=16 and num_attention_heads=12"),
    ("gpt2-medium", {"hidden_size": 12}, "n_embd=1024 and hidden_size=12"),
    (
        "gpt2-medium",
        {"max_position_embeddings": 12},
        "n_positions=1024 and max_position_embeddings=12",
    ),
    ("gpt2-medium", {"layer_types": ["sliding_attention"] * 24}, "layer_types"),
    (
        "qwen-7b-chat",
        {"layer_types": ["full_attention"] * 31},
        "layer_types names 31 layers where num_hidden_layers=32; correct",
    ),
    (
        "qwen-7b-chat",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm",
    ),
    ("qwen-7b-chat", {"n_layer": 31}, "num_hidden_layers=32 and n_layer=31"),
    ("qwen-7b-chat", {"padded_vocab_size": 31}, "vocab_size=151936 and padded_vocab_size=31"),
    ("qwen-7b-chat", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("qwen-7b-chat", {"activation": "geglu"}, "activation='geglu'"),
    ("qwen-7b-chat", {"sliding_window": 8}, "sliding_window=8"),
    (
        "qwen3",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32}},
        "beta_fast",
    ),
    ("llama-2", {"logit_scale": 0.25}, r"logit_scale=0\.25 changes what is computed"),
]


@pytest.mark.parametrize(("name", "change", "line"), REFUSED)
def test_what_changes_the_arithmetic_is_refused_by_name(
    name: str, change: dict[str, Any], line: str
) -> None:
    with pytest.raises(CheckpointError, match=line) as error:
        config_warnings({**PUBLISHED[name], **change})
    assert check_one_line(error.value).startswith("config.json: ")


FINE: list[tuple[str, dict[str, Any]]] = [
    ("llama-2", {"sliding_window": 4096}),  # as long as the longest sequence
    ("llama-2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 3}),
    (
        "llama-2",
        {"layer_types": ["full_attention"] * 32, "per_layer_config": {}, "is_causal": True},
    ),
    ("gpt2-medium", {"num_hidden_layers": 24, "hidden_size": 1024}),
    ("qwen2.5", {"layer_types": ["full_attention"] * 24}),
    ("qwen-7b-chat", {"layer_types": ["full_attention"] * 32}),  # a family that does not read it
    ("gpt2-medium", {"layer_types": ["full_attention"] * 24}),
    ("qwen-7b-chat", {"n_embd": 4096, "apply_residual_connection_post_layernorm": False}),
    ("llama-2", {"a_key_of_null": None, "_private": 1, "top_p": 1.0, "temperature": 1.0}),
]


@pytest.mark.parametrize(("name", "change"), FINE)
def test_neutral_values_say_nothing(name: str, change: dict[str, Any]) -> None:
    assert config_warnings({**PUBLISHED[name], **change}) == []


EXPERTS = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "counts", "line"),
    [
        ("granitemoe", {"num_experts": 4}, "num_experts=4 contradicts num_local_experts, .* 8 exp"),
        (
            "granitemoe",
            {"num_experts": 6, "num_local_experts": 4},
            "makes it 4 experts; remove num",
        ),
        ("mixtral", {"num_experts": 6, "num_local_experts": 4}, "num_local_experts=4 contradicts"),
    ],
)
def test_two_numbers_of_experts_are_named(
    model_type: str, counts: dict[str, Any], line: str
) -> None:
    with pytest.raises(CheckpointError, match=line):
        config_warnings({"model_type": model_type, **EXPERTS, **counts})


@pytest.mark.parametrize("model_type", ["granitemoe", "mixtral", "qwen3_moe"])
def test_one_number_of_experts_under_both_keys_says_nothing(model_type: str) -> None:
    both = {"num_experts": 4, "num_local_experts": 4}
    assert config_warnings({"model_type": model_type, **EXPERTS, **both}) == []


def test_a_model_without_attention_has_no_full_attention() -> None:
    raw = {
        "model_type": "mamba2", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
        "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1,
    }  # fmt: skip
    assert config_warnings(raw) == []
    with pytest.raises(CheckpointError, match="layer_types"):
        config_warnings({**raw, "layer_types": ["full_attention"] * 2})


NAMED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama-2", {"brand_new": 1, "another": "x"},
     ["config.json: another, brand_new are keys that are not read and have no effect"]),
    ("llama-2", {"temperature": 0.6},
    ["config.json: temperature is a key that is not read and " "has no effect"]),
    ("mistral", {"use_sliding_window": False},
     ["config.json: use_sliding_window is a key that is not read and has no effect"]),
    ("llama-3.1", {"rope_theta": 1.5e5, "partial_rotary_factor": 1}, []),
    ("llama-2", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}},
     ["config.json: rope_scaling.beta_fast is a key that is not read and has no effect"]),
    ("llama-2", {"x\ny" * 90: 1}, ["config.json: 'x\\ny"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "lines"), NAMED)
def test_unknown_keys_are_named(name: str, change: dict[str, Any], lines: list[str]) -> None:
    warnings = config_warnings({**PUBLISHED[name], **change})
    assert len(warnings) == len(lines)
    for line, expected in zip(warnings, lines, strict=True):
        assert line.startswith(expected)
        assert line.isprintable()


def test_the_build_and_inspect_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from modelmill.cli.main import run_command_line

    folder = write_folder(tmp_path / "hf", llama_state(), {**LLAMA_CONFIG, "brand_new": 1})
    words = ["build", str(folder), "-o", str(tmp_path / "e"), "--dtype", "float32", "--json"]
    assert run_command_line(words) == 0
    out = capsys.readouterr()
    [warning] = json.loads(out.out)["plan"]["warnings"]
    assert "brand_new" in warning
    assert f"modelmill: warning: {warning}" in out.err
    assert open_artifact(tmp_path / "e").manifest.source["warnings"] == [warning]
    assert run_command_line(["inspect", str(tmp_path / "e")]) == 0
    assert "brand_new" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["x", [2, "x"], True, 2.5])
def test_ids_that_end_an_answer_are_ids(tmp_path: Path, file: str, value: Any) -> None:
    folder = write_folder(tmp_path / "hf", llama_state(), LLAMA_CONFIG)
    path = folder / file
    present = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(present | {"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=rf"{file}: eos_token_id must be a token id") as error:
        make_build_plan(open_checkpoint(folder), FLOAT)
    check_one_line(error.value)


def test_a_plain_build_has_no_warnings_in_its_manifest(tmp_path: Path) -> None:
    made = make_build_plan(open_checkpoint(write_folder(tmp_path / "hf", llama_state())), FLOAT)
    build_engine.build(made, tmp_path / "e", None)
    assert "warnings" not in open_artifact(tmp_path / "e").manifest.source


def gguf(path: Path, **extra: tuple[str, Any]) -> Path:
    """A GGUF with more keys, dots for double underscores."""
    return write_llama_gguf(
        path, llama_state(), extra={k.replace("__", "."): v for k, v in extra.items()}
    )


def test_a_ggufs_keys(tmp_path: Path) -> None:
    fine = open_checkpoint(
        gguf(
            tmp_path / "a.gguf", attention__causal=("add_bool", True), vocab_size=("add_uint32", 20)
        )
    )
    assert make_build_plan(fine, FLOAT).warnings == ()
    odd = open_checkpoint(gguf(tmp_path / "b.gguf", pooling_type=("add_uint32", 3)))
    [warning] = make_build_plan(odd, FLOAT).warnings
    assert warning == "b.gguf: llama.pooling_type is a key that is not read and has no effect"
    causal = open_checkpoint(gguf(tmp_path / "c.gguf", attention__causal=("add_bool", False)))
    with pytest.raises(
        CheckpointError,
        match=r"c\.gguf: llama\.attention\.causal=False enables attention to later",
    ):
        make_build_plan(causal, FLOAT)
    with pytest.raises(UnknownArchitecture, match="later tokens"):
        open_reference(causal)
    for key, value in (
        ("attention__scale", 0.5),
        ("logit_scale", 0.5),
        ("final_logit_softcapping", 30.0),
    ):
        scaled = open_checkpoint(gguf(tmp_path / "d.gguf", **{key: ("add_float32", value)}))
        with pytest.raises(CheckpointError, match=key.replace("__", r"\.")):
            make_build_plan(scaled, FLOAT)


def test_a_ggufs_window_is_named(tmp_path: Path) -> None:
    """llama.cpp computes a llama with full attention, and so do we: no error, but no silence."""
    windowed = open_checkpoint(
        gguf(tmp_path / "w.gguf", attention__sliding_window=("add_uint32", 8))
    )
    [warning] = make_build_plan(windowed, FLOAT).warnings
    assert (
        warning
        == "w.gguf: llama.attention.sliding_window is a key that is not read and has no effect"
    )
    for no_limit in (0, LLAMA_CONFIG["max_position_embeddings"]):
        checkpoint = open_checkpoint(
            gguf(tmp_path / "w.gguf", attention__sliding_window=("add_uint32", no_limit))
        )
        assert make_build_plan(checkpoint, FLOAT).warnings == ()


def test_rotary_factors_of_a_gpt2_are_left_over(tmp_path: Path) -> None:
    """The model rotates nothing, so the keys stay unread."""
    import numpy as np
    from gguf import GGUFWriter

    from tests.checkpoint.checkpoint_factory import write_tensors

    writer = GGUFWriter(str(tmp_path / "m.gguf"), "gpt2")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-5)
    for name, shape in (("token_embd.weight", (12, 8)), ("rope_freqs.weight", (2,))):
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    write_tensors(writer)
    with pytest.raises(TensorMismatch, match=r"rope_freqs\.weight"):
        make_build_plan(open_checkpoint(tmp_path / "m.gguf"), FLOAT)


def test_the_reference_refuses_it_by_itself(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, llama_state(), {**LLAMA_CONFIG, "is_causal": False})
    with pytest.raises(UnknownArchitecture, match="later tokens"):
        open_reference(open_checkpoint(folder))


@pytest.mark.parametrize("part", ["vision_config", "prompt_encoder_config", "mask_decoder_config"])
def test_sams_parts(part: str) -> None:
    transformers = pytest.importorskip("transformers")
    raw = transformers.SamConfig(
        vision_config={"image_size": 64, "patch_size": 16}, prompt_encoder_config={"image_size": 64}
    ).to_dict()
    raw["mask_decoder_config"]["layer_norm_eps"] = 1e-5
    assert config_warnings(raw) == []
    raw[part]["unheard_of"] = 3
    [line] = config_warnings(raw)
    assert f"{part}.unheard_of" in line


def test_qwens_keys_of_its_first_release_say_nothing() -> None:
    old = {
        **QWEN,
        "activation": "swiglu",
        "pos_emb": "rotary",
        "n_layer": QWEN["num_hidden_layers"],
        "n_inner": None,
    }
    assert config_warnings(old) == []


def test_a_view_knows_what_was_read() -> None:
    view = ReadTrackingConfig({"a": 1, "b": 2, "c": None, "d": 4, "e": {"x": 1}})
    assert view.get("a") == 1
    assert view.get("z", 5) == 5
    over = with_config_defaults(view, {"a": 0, "f": 6}, overrides={"b": 3})
    assert (over["a"], over["b"], over["f"]) == (1, 3, 6)
    part = view.sub_view(view["e"], "e.")
    assert view.unread() == {"b": 2, "d": 4, "e.x": 1}
    assert part["x"] == 1
    view.mark_unread({"e.y": 7})
    assert view.unread() == {"b": 2, "d": 4, "e.y": 7}


def blip2(change: dict[str, Any]) -> list[str]:
    """What a build says of a BLIP-2's config; change: by part."""
    transformers = pytest.importorskip("transformers")
    from modelmill.checkpoint.blip2 import convert_blip2_config

    parts = {name: change.get(name, {}) for name in ("vision_config", "qformer_config")}
    text = {"model_type": "llama", "num_hidden_layers": 2, **change.get("text_config", {})}
    raw = transformers.Blip2Config(text_config=text, **parts).to_dict()
    raw["vision_config"] |= change.get("vision_config", {})
    config, _, unread = convert_blip2_config(raw, Path("m"))
    family, view = (
        import_module_if_exists("modelmill.models", "minigpt4"),
        ReadTrackingConfig(config),
    )
    assert family is not None
    sizes = family.config_from_hf(view)
    view.mark_unread(unread)
    return reject_or_warn_unread_keys(view, family, "config.json", sizes)


def test_blip2s_parts() -> None:
    assert blip2({}) == []
    [line] = blip2({"vision_config": {"unheard_of": 1}})
    assert "vision_config.unheard_of" in line
    with pytest.raises(
        CheckpointError, match=r"qformer_config\.position_embedding_type='relative_key'"
    ):
        blip2({"qformer_config": {"position_embedding_type": "relative_key"}})
    with pytest.raises(CheckpointError, match="is_causal"):
        blip2({"text_config": {"is_causal": False}})
