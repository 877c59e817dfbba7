"""Youtu-LLM."""

from __future__ import annotations

from typing import Any

from tests.models.family_cases import LLAMA_FAULTS, NULL, SMALL, FamilyCase, GgufCase
from tests.models.grouped_gguf import GGUF_YARN, latent_as_converted, latent_attention_facts
from tests.models.latent_faults import LATENT_FAULTS, YARN


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF, with those of experts that llama.cpp requires."""
    return {
        **latent_attention_facts(raw),
        "leading_dense_block_count": raw["num_hidden_layers"],
        "expert_feed_forward_length": raw["intermediate_size"],
        "expert_shared_count": 0,
    }


CASE = FamilyCase(
    "youtu",
    {**SMALL, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20,
     "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3},
        {"intermediate_size": 72}, {"max_position_embeddings": 128},
        {"num_attention_heads": 2, "num_key_value_heads": 2}, {"kv_lora_rank": 16},
        {"q_lora_rank": 12}, {"attention_bias": True}, {"qk_nope_head_dim": 16},
        {"qk_rope_head_dim": 4}, {"v_head_dim": 16}, {"rope_interleave": False},
        {"rope_scaling": YARN}, {"q_lora_rank": NULL},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}, {"tie_word_embeddings": False},
        {"embedding_initializer_range": 0.5},
    ),
    {"is_encoder_decoder": True, "hidden_act": "quick_gelu", "n_routed_experts": 8,
     "num_key_value_heads": 3, "kv_lora_rank": 0, "qk_rope_head_dim": 7, "rope_interleave": 1},
    {**LLAMA_FAULTS, **LATENT_FAULTS},
    gguf=GgufCase(
        "deepseek2", gguf_facts, changes={"rope_scaling": GGUF_YARN}, tensors=latent_as_converted
    ),
)  # fmt: skip
