"""Hunyuan 3."""

from __future__ import annotations

from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, moe_family

CASE = moe_family(
    "hy_v3",
    {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 12,
     "mlp_layer_types": ["sparse", "sparse"]},
    (
        {"num_experts": 4, "num_experts_per_tok": 3},
        {"num_experts": None, "num_local_experts": 5}, {"moe_intermediate_size": 24},
        {"num_shared_experts": 2}, {"router_scaling_factor": 1.0},
        {"mlp_layer_types": ["sparse", "dense"]}, {"mlp_layer_types": None},
        {"enable_moe_fp32_combine": False}, {"attention_bias": True}, {"mlp_bias": True},
        {"mlp_bias": True, "mlp_layer_types": None}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {"num_experts_per_tok": 7, "num_experts": "8", "moe_intermediate_size": 0,
     "num_shared_experts": 0, "router_scaling_factor": 0, "mlp_layer_types": ["dense"],
     "attention_bias": 1, "mlp_bias": 1, "qk_norm": False, "route_norm": False,
     "first_k_dense_replace": 3},
    {name: each for name, each in GROUPED_ROUTER_FAULTS.items() if "group" not in name},
    sizes=(
        {"num_key_value_heads": 4}, {"num_key_value_heads": 1},
        {"hidden_size": 64, "intermediate_size": 72}, {"vocab_size": 96},
        {"num_hidden_layers": 3, "mlp_layer_types": None}, {"max_position_embeddings": 128},
    ),
)  # fmt: skip
