"""ERNIE 4.5 with experts."""

from __future__ import annotations

from typing import Any

from tests.models.family_cases import GgufCase, rms_facts
from tests.models.grouped_gguf import stacked
from tests.models.moe_faults import MOE_FAULTS, moe_family


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF; the width of the shared experts as the converter computes it."""
    shared, width = raw["moe_num_shared_experts"], "expert_shared_feed_forward_length"
    return {
        **rms_facts(raw),
        "rope.freq_base": 500000.0,
        "expert_count": raw["moe_num_experts"],
        "expert_used_count": raw["moe_k"],
        "interleave_moe_layer_step": 1,
        "leading_dense_block_count": raw["moe_layer_start_index"],
        "expert_feed_forward_length": raw["moe_intermediate_size"],
        "expert_shared_count": shared,
        width: raw["intermediate_size"] // raw["num_key_value_heads"] if shared else None,
    }


CASE = moe_family(
    "ernie4_5_moe",
    {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40, "moe_num_shared_experts": 1,
     "moe_layer_start_index": 0},
    (
        {"moe_num_experts": 4, "moe_k": 3},
        {"moe_num_experts": None, "num_experts": 4, "moe_k": None, "num_experts_per_tok": 3},
        {"moe_intermediate_size": 24},
        {"moe_num_shared_experts": 2}, {"moe_num_shared_experts": 0},
        {"moe_layer_start_index": None}, {"moe_layer_end_index": 0},
        {"moe_layer_end_index": -1, "moe_layer_interval": 2}, {"moe_norm_min": 1e-9},
        {"use_bias": True}, {"use_bias": True, "tie_word_embeddings": False},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": False},
        {"head_dim": 16},
    ),
    {"moe_k": 7, "moe_num_experts": "8", "moe_intermediate_size": 0, "use_bias": 1,
     "moe_num_shared_experts": -1, "moe_layer_start_index": 2, "moe_layer_end_index": 5,
     "moe_layer_interval": 0, "moe_norm_min": 0.1},
    {n: f for n, f in MOE_FAULTS.items() if "sigmoid" not in n},
    gguf=GgufCase(
        "ernie4_5-moe", gguf_facts, tensors=stacked, changes={"moe_layer_start_index": 1}
    ),
)  # fmt: skip
