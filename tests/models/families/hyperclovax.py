"""HyperCLOVA X SEED."""

from __future__ import annotations

from tests.models.family_cases import decoder_family, fault, times

NOT_NORMED = {"use_post_norm": False, "residual_multiplier": 0.6}
CASE = decoder_family(
    "hyperclovax",
    {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 0.25,
     "head_dim": 12},
    (
        {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}, NOT_NORMED,
        {"use_post_norm": False}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16}, {"residual_multiplier": 1.0}, {"residual_multiplier": 0.6},
        {"embedding_multiplier": None, "attention_multiplier": None, "logits_scaling": None},
    ),
    {"residual_multiplier": 0, "logits_scaling": 0.0, "attention_bias": 1,
     "embedding_multiplier": -1.0, "attention_multiplier": "x", "use_post_norm": 1},
    {
        "eps x 10": fault(("attn_norm.eps", "attn_post.eps"), eps=times(10)),
        "no factor on scores": fault("attn.core", attention_scale=None),
        "embeddings x 1.05": fault("embed", None, embedding_scale=times(1.05)),
        "logits x 1.05": fault("head", None, logit_scale=times(1.05)),
        "branches x 1.05": fault("attn_post", case=NOT_NORMED, branch_scale=times(1.05)),
        "normed branches x 1.05": fault(
            "attn_post", case={"residual_multiplier": 0.6}, branch_scale=times(1.05)
        ),
        "normed branches without their factor": fault(
            "attn_post", case={"residual_multiplier": 0.6}, branch_scale=None
        ),
    },
)  # fmt: skip
