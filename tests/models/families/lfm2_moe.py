"""LFM2 with experts."""

from __future__ import annotations

from tests.models.families.lfm2 import LAYERS, ConvWithSilu
from tests.models.family_cases import COMMON_SWITCHES, ROTARY, based, fault
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, moe_family

CASE = moe_family(
    "lfm2_moe",
    {"layer_types": LAYERS, "num_experts": 6, "num_experts_per_tok": 2, "num_dense_layers": 0,
     "moe_intermediate_size": 40},
    (
        {"num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "full_attention"]},
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
         "num_dense_layers": None},
        {"num_experts": 4, "num_experts_per_tok": 3}, {"num_dense_layers": 1},
        {"num_dense_layers": 5}, {"moe_intermediate_size": 24}, {"use_expert_bias": False},
        {"norm_topk_prob": False}, {"routed_scaling_factor": 1.5}, {"norm_eps": 1e-3},
        {"tie_word_embeddings": False}, {"tie_embedding": False}, {"conv_bias": True},
        {"conv_L_cache": 4}, {"head_dim": 16},
    ),
    {
        "conv_L_cache": 1, "conv_bias": 1, "layer_types": ["conv"], "tie_embedding": 1,
        "norm_eps": "x", "num_experts_per_tok": 7, "num_experts": "8", "num_dense_layers": -1,
        "moe_intermediate_size": 0, "use_expert_bias": 1, "norm_topk_prob": 1,
        "routed_scaling_factor": 0,
    },
    {
        **{name: each for name, each in GROUPED_ROUTER_FAULTS.items() if "group" not in name},
        "RoPE base x 2": fault(ROTARY, 1, rope=based(2.0)),
        "SiLU behind the convolution": fault(
            "attn.conv", recurrence=lambda spec: ConvWithSilu(**vars(spec))
        ),
    },
    sizes=tuple(
        each for each in COMMON_SWITCHES if "num_hidden_layers" not in each
    ),
)  # fmt: skip
