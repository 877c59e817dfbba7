"""The config and tensors of GGUFs of dots.llm1, ERNIE 4.5 (experts), K-EXAONE and others.

llama.cpp's converter writes the bias of the choice of experts beside the router, and the layers of
multi-token prediction behind the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from modelmill.accept.reference.gguf_metadata import (
    add_rope_scaling,
    decoder_config,
    grouped_router_config,
    layer_types_from_window_pattern,
    make_metadata_reader,
)
from modelmill.accept.reference.gguf_source import (
    DEEPSEEK_ROUTER_AND_SHARED_TENSORS,
    GgufConfigReaderAndSource,
    GgufSource,
)
from modelmill.accept.reference.tensor_source import RawContainer

DOTS1_ARCHITECTURE, ERNIE_ARCHITECTURE, EXAONE_ARCHITECTURE, MINIMAX_ARCHITECTURE = (
    "dots1",
    "ernie4_5-moe",
    "exaone-moe",
    "minimax-m2",
)


def dots1_config(container: RawContainer) -> dict[str, Any]:
    """Return the config of dots.llm1, as far as the reference reads it."""
    config = add_rope_scaling(container, decoder_config(container, "dots1"))
    router = grouped_router_config(make_metadata_reader(container), normalized=False)
    return config | router | {"sliding_window": None}


def exaone_moe_config(container: RawContainer) -> dict[str, Any]:
    """Return the config of K-EXAONE, as far as the reference reads it."""
    fact = make_metadata_reader(container)
    config = add_rope_scaling(container, decoder_config(container, "exaone_moe"))
    return config | grouped_router_config(fact, normalized=False) | {
        "num_experts": int(fact("expert_count")),
        "sliding_window": int(fact("attention.sliding_window")),
        "layer_types": layer_types_from_window_pattern(fact, config["num_hidden_layers"]),
    }  # fmt: skip


def ernie4_5_moe_config(container: RawContainer) -> dict[str, Any]:
    """Return the config of ERNIE 4.5, as far as the reference reads it."""
    fact = make_metadata_reader(container)
    config = add_rope_scaling(container, decoder_config(container, "ernie4_5_moe"))
    return config | {
        "use_bias": config["attention_bias"],
        "moe_num_experts": int(fact("expert_count")),
        "moe_k": int(fact("expert_used_count")),
        "moe_num_shared_experts": int(fact("expert_shared_count", 0)),
        "moe_layer_start_index": int(fact("leading_dense_block_count", 0)),
        "moe_layer_interval": int(fact("interleave_moe_layer_step")),
    }


def minimax_m2_config(container: RawContainer) -> dict[str, Any]:
    """Return the config of MiniMax-M2, as far as the reference reads it."""
    fact = make_metadata_reader(container)
    config = add_rope_scaling(container, decoder_config(container, "minimax_m2"))
    return config | {
        "rotary_dim": int(fact("rope.dimension_count", config["head_dim"])),
        "num_local_experts": int(fact("expert_count")),
        "num_experts_per_tok": int(fact("expert_used_count")),
    }


def afmoe_config(container: RawContainer) -> dict[str, Any]:
    """Return the config of Trinity, whose embeddings and every fourth layer are fixed."""
    fact = make_metadata_reader(container)
    config = add_rope_scaling(container, decoder_config(container, "afmoe"))
    return config | {
        "num_experts": int(fact("expert_count")),
        "num_experts_per_tok": int(fact("expert_used_count")),
        "num_dense_layers": int(fact("leading_dense_block_count", 0)),
        "route_scale": float(fact("expert_weights_scale", 1.0)),
        "sliding_window": int(fact("attention.sliding_window")),
        "layer_types": layer_types_from_window_pattern(fact, config["num_hidden_layers"]),
        "mup_enabled": True,
    }


def sarvam_moe_config(container: RawContainer) -> dict[str, Any]:
    """Return the config of Sarvam 30B, or of Ling 2.0, which rotates a part of each head."""
    fact = make_metadata_reader(container)
    config = add_rope_scaling(container, decoder_config(container, "sarvam_moe"))
    turned = int(fact("rope.dimension_count", config["head_dim"]))
    return config | grouped_router_config(fact, normalized=False) | {
        "attention_bias": "blk.0.attn_qkv.bias" in container.names(),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in container.names(),
        "partial_rotary_factor": turned / config["head_dim"],
    }  # fmt: skip


class SelectionBiasGgufSource(GgufSource):
    """Such a container under Hugging Face names."""

    HF_TO_GGUF_NAMES: ClassVar[Mapping[str, str]] = DEEPSEEK_ROUTER_AND_SHARED_TENSORS


class AfmoeGgufSource(GgufSource):
    """A container of Trinity under Hugging Face names."""

    HF_TO_GGUF_NAMES: ClassVar[Mapping[str, str]] = {
        **DEEPSEEK_ROUTER_AND_SHARED_TENSORS,
        "mlp.router.gate": "ffn_gate_inp",
        "self_attn.gate_proj": "attn_gate",
        "post_attention_layernorm": "post_attention_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    }


class SarvamMoeGgufSource(GgufSource):
    """A container of Sarvam 30B under Hugging Face names."""

    HF_TO_GGUF_NAMES: ClassVar[Mapping[str, str]] = {
        **DEEPSEEK_ROUTER_AND_SHARED_TENSORS,
        "model.word_embeddings": "token_embd",
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "attention.query_layernorm": "attn_q_norm",
        "attention.key_layernorm": "attn_k_norm",
    }


CONFIG_READERS_AND_SOURCES: dict[str, GgufConfigReaderAndSource] = {
    "bailingmoe2": (sarvam_moe_config, SarvamMoeGgufSource),
    "afmoe": (afmoe_config, AfmoeGgufSource),
    DOTS1_ARCHITECTURE: (dots1_config, SelectionBiasGgufSource),
    ERNIE_ARCHITECTURE: (ernie4_5_moe_config, SelectionBiasGgufSource),
    EXAONE_ARCHITECTURE: (exaone_moe_config, SelectionBiasGgufSource),
    MINIMAX_ARCHITECTURE: (minimax_m2_config, SelectionBiasGgufSource),
}
