"""Granite 4."""

from __future__ import annotations

from tests.models.family_cases import (
    COMMON_SWITCHES,
    EPS_FAULT,
    REFUSED,
    SMALL,
    FamilyCase,
    changed,
    fault,
)
from tests.models.moe_faults import MOE_FAULTS, MOE_KV_TOLERANCE

LAYERS = ["mamba", "attention"]
CASE = FamilyCase(
    "granitemoehybrid",
    {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
     "attention_multiplier": 0.2, "residual_multiplier": 0.9, "logits_scaling": 4.0,
     "shared_intermediate_size": 40, "mamba_n_heads": 8, "mamba_d_state": 16, "layer_types": LAYERS,
     "position_embedding_type": "nope"},
    (
        *(each for each in COMMON_SWITCHES if "num_hidden_layers" not in each),
        {"num_hidden_layers": 3, "layer_types": ["mamba", "mamba", "attention"]},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"position_embedding_type": "rope"},
        {"position_embedding_type": "rope",
         "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"num_local_experts": 0}, {"num_local_experts": 3, "num_experts_per_tok": 3},
        {"attention_bias": True}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"embedding_multiplier": 1.0, "attention_multiplier": 0.3, "residual_multiplier": 1.0,
         "logits_scaling": 1.0},
        {"shared_intermediate_size": 24}, {"mamba_n_heads": 4, "mamba_d_head": 24},
        {"mamba_n_groups": 2}, {"mamba_d_state": 8}, {"mamba_d_conv": 3}, {"mamba_expand": 4},
        {"mamba_conv_bias": False}, {"mamba_proj_bias": True}, {"mamba_chunk_size": 16},
        {"time_step_limit": [0.4, 0.9]},
    ),
    {**REFUSED, "hidden_act": "gelu", "num_experts_per_tok": 6, "residual_multiplier": "x",
     "mamba_n_heads": 7, "mamba_d_head": 13, "mamba_n_groups": 3, "mamba_d_state": 0,
     "mamba_d_conv": 1, "mamba_expand": 0, "mamba_conv_bias": 1, "mamba_proj_bias": 1,
     "time_step_limit": [1.0], "position_embedding_type": "alibi", "layer_types": ["mamba"]},
    {
        **MOE_FAULTS,
        "eps x 10": EPS_FAULT,
        "steps limited": fault("attn.ssm", recurrence=changed(dt_limit=(0.0, 0.5))),
        "residual multiplier": fault("attn_post", branch_scale=0.95),
    },
    kv_tolerance=MOE_KV_TOLERANCE,
)  # fmt: skip
