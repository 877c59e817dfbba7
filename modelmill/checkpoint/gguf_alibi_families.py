"""GGUF architectures without a rotation, BLOOM, MPT and Baichuan 13B, and Baichuan 7B."""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import ArchitectureKeys
from modelmill.checkpoint.gguf_families import (
    LLAMA_NAMES,
    MEGATRON_LAYER_NAMES,
    GgufArchitecture,
    read_rms_config,
)
from modelmill.core.errors import UnknownArchitecture

BLOOM_NAMES = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    **MEGATRON_LAYER_NAMES,
}
MPT_NAMES = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "output": "lm_head",
    "blk.attn_norm": "norm_1",
    "blk.attn_qkv": "attn.Wqkv",
    "blk.attn_output": "attn.out_proj",
    "blk.ffn_norm": "norm_2",
    "blk.ffn_up": "ffn.up_proj",
    "blk.ffn_down": "ffn.down_proj",
}
# the depth by which llama.cpp tells Baichuan's 13B models, which have ALiBi
BAICHUAN_13B_LAYERS = 40


def _read_alibi_sizes(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read the sizes; there is one KV head for each head, and the MLP is four times as wide."""
    width, heads = (
        keys.get_positive_int("embedding_length"),
        keys.get_positive_int("attention.head_count"),
    )
    kv_heads = keys.get_positive_int("attention.head_count_kv", heads)
    inner = keys.get_positive_int("feed_forward_length")
    if kv_heads != heads or inner != 4 * width:
        raise UnknownArchitecture(
            f"{keys.raw.path}: has {kv_heads} KV heads for {heads} heads and {inner} channels in "
            f"the MLP for a width of {width}; modelmill computes a {keys.arch} with as many KV "
            "heads as heads and four times the width"
        )
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_hidden_layers": keys.get_positive_int("block_count"),
        "layer_norm_epsilon": keys.get_positive_float("attention.layer_norm_epsilon"),
    }


def _read_bloom_config(keys: ArchitectureKeys) -> dict[str, Any]:
    return {**_read_alibi_sizes(keys), "seq_length": keys.get_positive_int("context_length")}


def _read_mpt_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read MPT; learned positions and norms of q and k are tensors that are refused as unused."""
    clip = "attention.clamp_kqv"
    return {
        **_read_alibi_sizes(keys),
        "max_seq_len": keys.get_positive_int("context_length"),
        "attn_config": {
            "clip_qkv": keys.get_positive_float(clip) if clip in keys else None,
            "alibi": True,
            "alibi_bias_max": keys.get_positive_float("attention.max_alibi_bias"),
        },
    }


def _read_baichuan_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Baichuan: q, k and v apart, the head as it is multiplied; 7B is a LLaMA there."""
    keys.view.get(f"{keys.arch}.tensor_data_layout")  # how q and k are ordered, which is known
    config = {**read_rms_config(keys), "attention_bias": False, "mlp_bias": False}
    if keys.get_positive_int("block_count") != BAICHUAN_13B_LAYERS:
        return {"model_type": "llama", **config}
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        "model_type": "baichuan",
        **{name: config[name] for name in (*kept, "num_key_value_heads", "rms_norm_eps")},
        "model_max_length": config["max_position_embeddings"],
    }


ALIBI_ARCHITECTURES = {
    "bloom": GgufArchitecture(
        BLOOM_NAMES, "transformer.h", grouped_qkv=True, read_config=_read_bloom_config
    ),
    "mpt": GgufArchitecture(MPT_NAMES, "transformer.blocks", read_config=_read_mpt_config),
    "baichuan": GgufArchitecture(
        LLAMA_NAMES,
        has_permuted_qk=True,
        read_config=_read_baichuan_config,
        chosen_types=("llama", "baichuan"),
    ),
}
