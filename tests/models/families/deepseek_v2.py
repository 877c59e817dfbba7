"""DeepSeek-V2 and V2-Lite."""

from __future__ import annotations

from tests.models.family_cases import LLAMA_FAULTS, NULL, SMALL, FamilyCase, GgufCase, fault
from tests.models.grouped_gguf import GGUF_YARN, latent_as_converted, latent_facts
from tests.models.latent_faults import LATENT_FAULTS, YARN
from tests.models.moe_faults import MOE_KV_TOLERANCE, ROUTING, one_fewer, with_router

GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}

CASE = FamilyCase(
    "deepseek_v2",
    {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    | {"kv_lora_rank": 24, "q_lora_rank": NULL, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
       "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
       "moe_intermediate_size": 24, "routed_scaling_factor": 1.5},
    (
        {"vocab_size": 96}, {"hidden_size": 64}, {"num_hidden_layers": 3},
        {"intermediate_size": 72, "first_k_dense_replace": 1}, {"max_position_embeddings": 128},
        {"num_attention_heads": 2}, {"num_key_value_heads": 4}, {"kv_lora_rank": 16},
        {"q_lora_rank": 20}, {"q_lora_rank": 20, "attention_bias": True},
        {"qk_nope_head_dim": 16}, {"qk_rope_head_dim": 4}, {"v_head_dim": 16},
        {"n_routed_experts": 4}, {"num_experts_per_tok": 1}, {"n_shared_experts": 1},
        {"moe_intermediate_size": 40}, {"routed_scaling_factor": 1.0}, GROUPS,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"rope_scaling": YARN}, {"rms_norm_eps": 1e-3},
        {"hidden_act": "gelu"}, {"tie_word_embeddings": True}, {"topk_method": "greedy"},
    ),
    {"is_encoder_decoder": True, "hidden_act": "quick_gelu", "num_experts_per_tok": 9,
     "n_routed_experts": 0, "topk_method": "noaux", "norm_topk_prob": True, "mlp_bias": True,
     "first_k_dense_replace": 3, "num_key_value_heads": 3, "kv_lora_rank": 0,
     "qk_rope_head_dim": 7, "attention_bias": 1},
    {
        **LLAMA_FAULTS,
        **LATENT_FAULTS,
        "one expert fewer": fault(ROUTING, moe=with_router(top_k=one_fewer)),
        "renormalized": fault(ROUTING, moe=with_router(renormalize=True)),
        "two best experts of a group": fault(
            ROUTING, case=GROUPS, moe=with_router(group_scores=2)
        ),
        "no groups": fault(ROUTING, case=GROUPS, moe=with_router(groups=1, top_groups=1)),
    },
    unnamed_fields=frozenset({"head_dim"}),  # follows from qk_rope_head_dim
    kv_tolerance=MOE_KV_TOLERANCE,
    gguf=GgufCase(
        "deepseek2", lambda raw: latent_facts(raw, 1),
        changes={"rope_scaling": GGUF_YARN}, tensors=latent_as_converted,
    ),
)  # fmt: skip
