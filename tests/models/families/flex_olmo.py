"""FlexOlmo."""

from __future__ import annotations

from tests.models.family_cases import QK_NORM, fault, times, with_eps
from tests.models.moe_faults import MOE_FAULTS, moe_family

CASE = moe_family(
    "flex_olmo",
    {"num_experts": 6, "num_experts_per_tok": 2},
    (
        {"num_experts": 4, "num_experts_per_tok": 3}, {"norm_topk_prob": True},
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {"num_experts_per_tok": 7, "num_experts": 0, "norm_topk_prob": "x", "attention_bias": 1},
    {
        **MOE_FAULTS,
        "eps x 10": fault("attn_post.eps", eps=times(10)),
        "norms over q and k, eps x 100": fault(QK_NORM, qkv_norm=with_eps(100)),
    },
)  # fmt: skip
