"""Mistral Small 4."""

from __future__ import annotations

from typing import Any

from modelmill.nn.attention_temperature import AttentionTemperature
from tests.models.family_cases import LLAMA_FAULTS, NULL, FamilyCase, changed, fault
from tests.models.latent_faults import LATENT_FAULTS
from tests.models.latent_sizes import LATENT_MOE_BASE, LATENT_MOE_SWITCHES
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, MOE_FAULTS, MOE_KV_TOLERANCE

YARN: dict[str, Any] = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0,
    "original_max_position_embeddings": 16, "max_position_embeddings": 64, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
QUERIES = ("attn.rope_cache.q", "attn.core")

CASE = FamilyCase(
    "mistral4",
    LATENT_MOE_BASE | {"rope_parameters": YARN},
    (
        *LATENT_MOE_SWITCHES, {"num_hidden_layers": 3}, {"q_lora_rank": 12}, {"q_lora_rank": NULL},
        {"intermediate_size": 72, "first_k_dense_replace": 1}, {"attention_bias": True},
        {"routed_scaling_factor": 1.5},
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.4}},
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.0, "mscale": 0.5}},
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 40,
                             "mscale_all_dim": 0.5}},
        {"rope_parameters": None,
         "rope_scaling": {**YARN, "rope_theta": 300.0, "partial_rotary_factor": 0.4}},
    ),
    {"is_encoder_decoder": True, "hidden_act": "quick_gelu", "num_experts_per_tok": 5,
     "n_routed_experts": 0, "n_group": 3, "topk_group": 5, "scoring_func": "sigmoid",
     "first_k_dense_replace": 3, "num_key_value_heads": 3, "kv_lora_rank": 0,
     "qk_rope_head_dim": 7, "rope_interleave": 1, "norm_topk_prob": 1,
     "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    {
        **LLAMA_FAULTS,
        **{name: each for name, each in LATENT_FAULTS.items() if "YaRN" not in name},
        "no factor of YaRN": fault("attn.core", latent_attention=changed(scale=20**-0.5)),
        **MOE_FAULTS,
        **{name: each for name, each in GROUPED_ROUTER_FAULTS.items() if "group" in name},
        "queries that do not grow": fault(
            QUERIES, attention_temperature=AttentionTemperature(0.0, 16)
        ),
        "another slope": fault(QUERIES, attention_temperature=AttentionTemperature(0.35, 16)),
    },
    kv_tolerance=MOE_KV_TOLERANCE,
)  # fmt: skip
