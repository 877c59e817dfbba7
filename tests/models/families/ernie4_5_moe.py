"""ERNIE 4.5 with experts."""

from __future__ import annotations

from tests.models.moe_faults import MOE_FAULTS, moe_family

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
)  # fmt: skip
