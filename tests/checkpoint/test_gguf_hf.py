"""A Hugging Face model written to GGUF the way llama.cpp's converter does, and presented back."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelmill.accept.reference import open_reference
from modelmill.checkpoint.gguf import GgufFile
from modelmill.checkpoint.gguf_hf import GgufAsHf
from modelmill.checkpoint.gguf_rope_scaling import llama3_frequency_divisors
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.errors import (
    CheckpointError,
    CorruptCheckpoint,
    TensorMismatch,
    UnknownArchitecture,
)
from modelmill.core.generation_defaults import parse_generation_config
from modelmill.core.module_lookup import import_module_if_exists
from tests.checkpoint.checkpoint_factory import (
    LLAMA_CONFIG,
    TOKENS,
    gguf_names,
    llama_state,
    write_llama_gguf,
    write_tensors,
)
from tests.hypothesis_examples import examples


def present(path: Path) -> GgufAsHf:
    return GgufAsHf(GgufFile(path))


def assert_same(view: GgufAsHf, state: dict[str, torch.Tensor]) -> None:
    assert sorted(view.names()) == sorted(state)
    for name, tensor in state.items():
        assert view.tensor_info(name).shape == tuple(tensor.shape)
        assert torch.equal(view.get(name), tensor), name


def test_llama_comes_back_value_by_value(tmp_path):
    state = llama_state()
    view = present(write_llama_gguf(tmp_path / "m.gguf", state))
    assert_same(view, state)
    assert {key: view.config[key] for key in LLAMA_CONFIG} == LLAMA_CONFIG
    assert view.config["rope_scaling"] is None
    assert view.config["torch_dtype"] == "float32"
    assert not view.config["attention_bias"]
    assert view.generation_config == {"bos_token_id": 1, "eos_token_id": 2}


def test_what_its_publisher_recommends_is_read_as_llama_cpp_reads_it(tmp_path):
    raw = GgufFile(write_llama_gguf(tmp_path / "m.gguf", llama_state()))
    metadata = {
        "temp": float(np.float32(0.6)),
        "top_k": 20,
        "top_p": float(np.float32(0.95)),
        "mirostat": 1,
    }
    raw.metadata |= {f"general.sampling.{key}": value for key, value in metadata.items()}
    defaults = parse_generation_config(GgufAsHf(raw).generation_config, "gguf")
    assert defaults.source == "checkpoint"
    assert defaults.values == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert (
        parse_generation_config(present(tmp_path / "m.gguf").generation_config, "gguf").source
        == "modelmill"
    )


def test_transformers_own_gguf_reader_agrees(tmp_path):
    utils = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    from transformers import LlamaConfig, LlamaForCausalLM

    path = write_llama_gguf(tmp_path / "m.gguf", llama_state())
    view = present(path)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**view.config))
    hf_checkpoint = utils.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    for name, tensor in hf_checkpoint["tensors"].items():
        assert torch.equal(view.get(name), tensor), name
    assert len(hf_checkpoint["tensors"]) == len(view.names())
    same = [
        "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads",
        "max_position_embeddings rope_theta vocab_size bos_token_id eos_token_id "
        "tie_word_embeddings",
    ]
    for key in " ".join(same).split():
        assert hf_checkpoint["config"].get(key, view.config[key]) == view.config[key], key
    assert hf_checkpoint["config"]["rms_norm_eps"] == pytest.approx(view.config["rms_norm_eps"])


def test_biases_of_q_and_k_are_put_back_too(tmp_path):
    state = llama_state()
    for i in range(2):
        for part, rows in (("q", 32), ("k", 16), ("v", 16)):
            state[f"model.layers.{i}.self_attn.{part}_proj.bias"] = torch.randn(rows)
    view = present(write_llama_gguf(tmp_path / "m.gguf", state))
    assert_same(view, state)
    assert view.config["attention_bias"]


def test_tied_embeddings_are_recognised(tmp_path):
    state = llama_state()
    del state["lm_head.weight"]
    view = present(write_llama_gguf(tmp_path / "m.gguf", state))
    assert view.config["tie_word_embeddings"]
    assert "lm_head.weight" not in view.names()


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen2_and_qwen3_rows_stay_where_they_are(tmp_path, arch):
    state = llama_state()
    for i in range(2):
        prefix = f"model.layers.{i}.self_attn."
        if arch == "qwen2":
            state |= {
                prefix + f"{p}_proj.bias": torch.randn(n)
                for p, n in (("q", 32), ("k", 16), ("v", 16))
            }
        else:
            state |= {
                prefix + "q_norm.weight": torch.randn(8),
                prefix + "k_norm.weight": torch.randn(8),
            }
    extra = {"attention.key_length": ("add_uint32", 8), "attention.value_length": ("add_uint32", 8)}
    view = present(write_llama_gguf(tmp_path / "m.gguf", state, arch, extra))
    assert_same(view, state)
    assert view.config["model_type"] == arch
    assert view.config["attention_bias"] == (arch == "qwen2")
    assert view.config["head_dim"] == 8


def test_yarn_and_linear_scaling_reach_the_config(tmp_path):
    extra = {
        "rope.scaling.type": ("add_string", "yarn"),
        "rope.scaling.factor": ("add_float32", 4.0),
        "rope.scaling.original_context_length": ("add_uint32", 16),
    }
    view = present(write_llama_gguf(tmp_path / "m.gguf", llama_state(), "qwen2", extra))
    assert view.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }


def test_llama3_scaling_is_read_from_its_tensor(tmp_path):
    factors = np.array(
        llama3_frequency_divisors(4, 10000.0, 8.0, (1.0, 4.0, 512.0)), dtype=np.float32
    )
    extra = {"rope.scaling.original_context_length": ("add_uint32", 512)}
    more = {"rope_freqs.weight": factors}
    view = present(write_llama_gguf(tmp_path / "m.gguf", llama_state(), extra=extra, more=more))
    assert "rope_freqs.weight" not in view.names()
    assert view.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }


def test_factors_beside_the_tensor_are_refused(tmp_path):
    more = {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    extra = {"rope.scaling.attn_factor": ("add_float32", 0.5)}
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*attn_factor is 0\.5"):
        present(write_llama_gguf(tmp_path / "m.gguf", llama_state(), extra=extra, more=more))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_window_that_no_runtime_computes_is_in_neither_config(tmp_path, arch):
    """llama.cpp gives these three full attention whatever the key says; engine and reference do the
    same.
    """
    extra = {
        "attention.sliding_window": ("add_uint32", 16),
        "attention.key_length": ("add_uint32", 8),
    }
    view = present(write_llama_gguf(tmp_path / "m.gguf", llama_state(), arch, extra))
    assert not any(
        import_module_if_exists("modelmill.models", arch).config_from_hf(view.config).windows
    )
    assert open_reference(open_checkpoint(tmp_path / "m.gguf")).windows == [None, None]


def test_rope_freqs_of_a_wrong_length_are_corrupt(tmp_path):
    more = {"rope_freqs.weight": np.ones(7, dtype=np.float32)}
    with pytest.raises(CorruptCheckpoint, match=r"rope_freqs\.weight has \[7\]"):
        present(write_llama_gguf(tmp_path / "m.gguf", llama_state(), more=more))


def write_other(
    path: Path, arch: str, gguf_arch: int, state: dict[str, torch.Tensor], keys: dict[str, float]
) -> Path:
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in keys.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{key}", value)
    names = gguf_names(gguf_arch, 1)
    for name, tensor in state.items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(target, np.ascontiguousarray(tensor.numpy()))
    write_tensors(writer)
    return path


def test_gpt2_weights_are_conv1d_again_and_the_second_head_is_dropped(tmp_path):
    made = torch.Generator().manual_seed(0)
    h = "transformer.h.0."
    shapes = {
        "transformer.wte.weight": (20, 8),
        "transformer.wpe.weight": (16, 8),
        "transformer.ln_f.weight": (8,),
        "transformer.ln_f.bias": (8,),
        h + "ln_1.weight": (8,),
        h + "attn.c_attn.weight": (8, 24),
        h + "attn.c_attn.bias": (24,),
        h + "attn.c_proj.weight": (8, 8),
        h + "mlp.c_fc.weight": (8, 32),
        h + "mlp.c_proj.weight": (32, 8),
    }
    state = {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    stored = {name: t.t() if name.endswith(conv1d) else t for name, t in state.items()}
    stored["lm_head.weight"] = state["transformer.wte.weight"]
    keys = {
        "block_count": 1,
        "context_length": 16,
        "embedding_length": 8,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "attention.layer_norm_epsilon": 1e-5,
    }
    view = present(write_other(tmp_path / "g.gguf", "gpt2", gguf.MODEL_ARCH.GPT2, stored, keys))
    assert_same(view, state)
    assert (
        view.config | {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 32, "n_positions": 16}
        == view.config
    )
    assert view.config["layer_norm_epsilon"] == 1e-5
    assert view.config["tie_word_embeddings"]

    stored["lm_head.weight"] = torch.zeros(20, 8)
    view = present(write_other(tmp_path / "g.gguf", "gpt2", gguf.MODEL_ARCH.GPT2, stored, keys))
    assert not view.config["tie_word_embeddings"]
    assert torch.equal(view.get("lm_head.weight"), torch.zeros(20, 8))


@pytest.mark.parametrize("stated", [32, 16])
def test_qwen_v1_keeps_fused_rows_and_counts_both_mlp_halves(tmp_path, stated):
    layer = {
        "ln_1.weight": (8,),
        "ln_2.weight": (8,),
        "attn.c_attn.weight": (24, 8),
        "attn.c_attn.bias": (24,),
        "attn.c_proj.weight": (8, 8),
        "mlp.w1.weight": (16, 8),
        "mlp.w2.weight": (16, 8),
        "mlp.c_proj.weight": (8, 16),
    }
    shapes = {
        "transformer.wte.weight": (20, 8),
        "transformer.ln_f.weight": (8,),
        "lm_head.weight": (20, 8),
        **{f"transformer.h.0.{name}": shape for name, shape in layer.items()},
    }
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    keys = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 8,
        "feed_forward_length": stated,
        "attention.head_count": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 4,
    }
    view = present(write_other(tmp_path / "q.gguf", "qwen", gguf.MODEL_ARCH.QWEN, state, keys))
    assert_same(view, state)
    assert view.config["intermediate_size"] == 32
    assert view.config["kv_channels"] == 4
    assert view.config["layer_norm_epsilon"] == 1e-6
    assert (view.config["seq_length"], view.config["use_dynamic_ntk"]) == (64, False)
    scaled = keys | {"rope.scaling.factor": 2.0}
    with pytest.raises(UnknownArchitecture, match=r"s\.gguf: scales the positions of a Qwen v1"):
        present(write_other(tmp_path / "s.gguf", "qwen", gguf.MODEL_ARCH.QWEN, state, scaled))


def test_unknown_tensors_keep_their_name_for_the_rename_rules_to_report(tmp_path):
    more = {
        "blk.0.attn_sinks.weight": np.ones(4, np.float32),
        "blk.x.attn_q.weight": np.ones(4, np.float32),
    }
    # more digits than Python reads
    more["blk." + "1" * 5000 + ".attn_norm.weight"] = np.ones(4, np.float32)
    view = present(write_llama_gguf(tmp_path / "m.gguf", llama_state(), more=more))
    assert set(more) <= set(view.names())


def test_vocabulary_holds_every_tokenizer_key(tmp_path):
    view = present(write_llama_gguf(tmp_path / "m.gguf", llama_state()))
    vocabulary = json.loads(view.tokenizer_metadata_json())
    assert vocabulary["tokenizer.ggml.tokens"] == TOKENS
    assert vocabulary["tokenizer.ggml.token_type"] == [1] * 20
    assert vocabulary["tokenizer.ggml.merges"] == ["a b", "c d"]
    assert vocabulary["tokenizer.ggml.add_bos_token"] is False
    assert vocabulary["tokenizer.chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"expert_count": ("add_uint32", 8)}, CorruptCheckpoint, "expert_used_count is missing"),
        ({"attention.value_length": ("add_uint32", 4)}, UnknownArchitecture, "4 values"),
        ({"rope.scaling.attn_factor": ("add_float32", 0.5)}, CheckpointError, "attn_factor is 0.5"),
        ({"attention.key_length": ("add_uint32", 0)}, CorruptCheckpoint, "key_length is 0"),
        ({"attention.key_length": ("add_uint64", 1 << 60)}, CorruptCheckpoint, "key_length is"),
        (
            {
                "rope.scaling.type": ("add_string", "su"),
                "rope.scaling.factor": ("add_float32", 2.0),
            },
            None,
            "'su'",
        ),
    ],
)
def test_variants_and_nonsense_are_distinguished(tmp_path, extra, error, message):
    with pytest.raises(error or CheckpointError, match=message) as caught:
        present(write_llama_gguf(tmp_path / "m.gguf", llama_state(), extra=extra))
    assert "m.gguf" in str(caught.value)


def test_other_architectures_are_named(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    write_tensors(writer)
    with pytest.raises(UnknownArchitecture, match="'mamba'"):
        present(tmp_path / "m.gguf")


def test_missing_keys_and_tensors_are_named(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    write_tensors(writer)
    with pytest.raises(CorruptCheckpoint, match=r"token_embd\.weight"):
        present(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    write_tensors(writer)
    with pytest.raises(CorruptCheckpoint, match=r"llama\.attention\.head_count is missing"):
        present(tmp_path / "m.gguf")


def test_more_tokens_than_embedding_rows_are_refused(tmp_path):
    with pytest.raises(CorruptCheckpoint, match="20 tokens but only 10"):
        present(write_llama_gguf(tmp_path / "m.gguf", llama_state(vocabulary=10)))


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path):
    state = llama_state()
    state["model.layers.0.self_attn.v_proj.weight"] = torch.ones(3, 32)
    path = write_llama_gguf(tmp_path / "m.gguf", state)
    data = path.read_bytes().replace(b"blk.0.attn_k.weight", b"blk.0.attn_x.weight")
    path.write_bytes(data.replace(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight"))
    with pytest.raises(CorruptCheckpoint, match="heads do not divide"):
        present(path)


KEYS = [
    "attention.head_count_kv attention.key_length attention.value_length rope.scaling.attn_factor",
    "rope.dimension_count_x rope.scaling.type rope.scaling.factor "
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast rope.scaling.yarn_ext_factor rope.scale_linear expert_count",
]
nonsense = st.one_of(
    st.tuples(st.just("add_uint64"), st.sampled_from([0, 1, 3, 1 << 20, (1 << 64) - 1])),
    st.tuples(st.just("add_int32"), st.sampled_from([0, -1])),
    st.tuples(st.just("add_float64"), st.sampled_from([0.0, -1.0, 1e-320, 8.0, 1e308])),
    st.tuples(st.just("add_string"), st.sampled_from(["yarn", "linear", "8"])),
    st.tuples(st.just("add_bool"), st.booleans()),
    st.tuples(st.just("add_array"), st.just([1, 2])),
)


@settings(
    deadline=None,
    max_examples=examples(120, 30),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.dictionaries(st.sampled_from(" ".join(KEYS).split()), nonsense, min_size=1, max_size=4),
    st.one_of(st.none(), st.lists(st.floats(width=32), min_size=4, max_size=4)),
)
def test_senseless_keys_are_one_line_or_a_config(tmp_path, extra, factors):
    more = {} if factors is None else {"rope_freqs.weight": np.array(factors, dtype=np.float32)}
    path = write_llama_gguf(tmp_path / "m.gguf", llama_state(), extra=extra, more=more)
    line = str(path)
    try:
        json.dumps(present(path).config)
    except CheckpointError as error:
        line = str(error)
    assert str(path) in line
    assert "\n" not in line


def test_unknown_names_are_named(tmp_path):
    view = present(write_llama_gguf(tmp_path / "m.gguf", llama_state()))
    for ask in (view.get, view.tensor_info):
        with pytest.raises(TensorMismatch, match=r"'blk\.0\.attn_q\.weight'"):
            ask("blk.0.attn_q.weight")
