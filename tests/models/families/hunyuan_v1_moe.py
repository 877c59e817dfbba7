"""Hunyuan with experts."""

from __future__ import annotations

from typing import Any

from tests.models.expert_gguf import stack_experts
from tests.models.families.hunyuan_v1_dense import (
    BASE,
    FAULTS,
    HUNYUAN_ROPES,
    REFUSED,
    gguf_facts,
)
from tests.models.family_cases import GgufCase
from tests.models.moe_faults import MOE_FAULTS, moe_family


def moe_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF."""
    return {
        **gguf_facts(raw),
        "expert_count": raw["num_experts"],
        "expert_used_count": raw["moe_topk"],
        "expert_feed_forward_length": raw["intermediate_size"],
        "expert_shared_feed_forward_length": raw["intermediate_size"],
        "expert_shared_count": 1,
    }


CASE = moe_family(
    "hunyuan_v1_moe",
    {**BASE, "num_experts": 6, "moe_topk": 2},
    (
        {"num_experts": 4, "moe_topk": [3, 3]}, {"moe_topk": None},
        {"num_experts": None, "num_local_experts": 3}, {"num_experts": None, "moe_topk": None},
        {"moe_topk": None, "num_experts_per_tok": 3},
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3},
        {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {
        **REFUSED, "moe_topk": [1, 2], "num_experts": 0, "moe_intermediate_size": 24,
        "num_shared_expert": [2, 2], "num_local_experts": 4, "num_experts_per_tok": 3,
        "norm_topk_prob": False, "use_mixed_mlp_moe": False, "use_cla": True,
    },
    {**MOE_FAULTS, **FAULTS},
    ropes=HUNYUAN_ROPES[-3:],
    unnamed_fields=frozenset({"eod_token_id", "sep_token_id"}),
    gguf=GgufCase("hunyuan-moe", moe_facts, tensors=lambda _, tensors: stack_experts(tensors)),
)  # fmt: skip
