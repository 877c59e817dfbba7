"""dots.llm1."""

from __future__ import annotations

from typing import Any

from tests.models.family_cases import NULL, GgufCase, decoder_family, fault, rms_facts
from tests.models.grouped_gguf import router_facts, stacked
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, MOE_KV_TOLERANCE


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF, which has no windows."""
    return {**rms_facts(raw), **router_facts(raw, 2)}


CASE = decoder_family(
    "dots1",
    {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
     "n_shared_experts": 1, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5,
     "sliding_window": 20},
    (
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}, {"num_experts_per_tok": 1},
        {"n_group": 2, "topk_group": 1}, {"moe_intermediate_size": 24}, {"n_shared_experts": 2},
        {"routed_scaling_factor": 1.0}, {"norm_topk_prob": True}, {"first_k_dense_replace": 1},
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"head_dim": 16}, {"sliding_window": 5},
        {"max_window_layers": 1}, {"max_window_layers": 0},
        {"layer_types": ["sliding_attention", "full_attention"], "max_window_layers": 2},
    ),
    {"num_experts_per_tok": 5, "n_group": 3, "topk_group": 5, "n_routed_experts": 0,
     "first_k_dense_replace": 3, "moe_intermediate_size": "x", "n_shared_experts": 0,
     "norm_topk_prob": 1, "routed_scaling_factor": 0, "head_dim": 7, "layer_types": ["mamba"],
     "max_window_layers": "x"},
    {
        **GROUPED_ROUTER_FAULTS,
        "windows in all layers": fault(
            "attn.core", windows=(20, 20), case={"max_window_layers": 1}
        ),
    },
    kv_tolerance=MOE_KV_TOLERANCE,
    # llama.cpp reads as many KV heads as heads
    gguf=GgufCase(
        "dots1", gguf_facts, tensors=stacked,
        changes={"num_key_value_heads": 4, "first_k_dense_replace": 1, "norm_topk_prob": True,
                 "rms_norm_eps": 1e-5, "sliding_window": NULL},
    ),
)  # fmt: skip
