"""DeepSeek-V3."""

from __future__ import annotations

from tests.models.family_cases import LLAMA_FAULTS, NULL, FamilyCase, GgufCase
from tests.models.grouped_gguf import GGUF_YARN, latent_as_converted, latent_facts
from tests.models.latent_faults import LATENT_FAULTS, YARN
from tests.models.latent_sizes import LATENT_MOE_BASE, LATENT_MOE_SWITCHES
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, MOE_KV_TOLERANCE

CASE = FamilyCase(
    "deepseek_v3",
    LATENT_MOE_BASE | {"first_k_dense_replace": 0},
    (
        *LATENT_MOE_SWITCHES, {"num_hidden_layers": 3}, {"q_lora_rank": 12}, {"q_lora_rank": NULL},
        {"intermediate_size": 72, "first_k_dense_replace": 1}, {"attention_bias": True},
        {"routed_scaling_factor": 1.0}, {"rope_scaling": YARN}, {"num_mtp_layers": 0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    ),
    {"is_encoder_decoder": True, "hidden_act": "quick_gelu", "num_experts_per_tok": 5,
     "n_routed_experts": 0, "n_group": 3, "topk_group": 5, "topk_method": "greedy",
     "scoring_func": "softmax", "first_k_dense_replace": 3, "num_key_value_heads": 3,
     "kv_lora_rank": 0, "qk_rope_head_dim": 7, "rope_interleave": 1, "norm_topk_prob": 1},
    {**LLAMA_FAULTS, **LATENT_FAULTS, **GROUPED_ROUTER_FAULTS},
    kv_tolerance=MOE_KV_TOLERANCE,
    gguf=GgufCase(
        "deepseek2", lambda raw: latent_facts(raw, 2),
        changes={"rope_scaling": GGUF_YARN, "first_k_dense_replace": 1},
        tensors=latent_as_converted,
    ),
)  # fmt: skip
