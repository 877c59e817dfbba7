"""K-EXAONE."""

from __future__ import annotations

from typing import Any

from tests.models.expert_gguf import Tensors
from tests.models.family_cases import (
    ALL_ROTATED,
    GQA_SIZES,
    GgufCase,
    decoder_family,
    fault,
    rms_facts,
)
from tests.models.grouped_gguf import router_facts, stacked, with_predicting_layer
from tests.models.moe_faults import GROUPED_ROUTER_FAULTS, MOE_KV_TOLERANCE


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF; a layer that predicts is counted among the blocks."""
    layers, pattern = raw["num_hidden_layers"], raw["sliding_window_pattern"]
    experts = {"n_routed_experts": raw["num_experts"], "first_k_dense_replace": 1}
    return {
        **rms_facts(raw),
        **router_facts({**raw, **experts}, 2),
        "block_count": layers + 1,
        "nextn_predict_layers": 1,
        "expert_shared_feed_forward_length": raw["moe_intermediate_size"],
        "attention.sliding_window": raw["sliding_window"],
        "attention.sliding_window_pattern": [(i + 1) % pattern != 0 for i in range(layers)],
        "rope.scaling.type": "none",
    }


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """With a layer that predicts, which has an MLP."""
    return with_predicting_layer(raw, stacked(raw, tensors), 0)


CASE = decoder_family(
    "exaone_moe",
    {"num_hidden_layers": 3, "sliding_window": 20, "sliding_window_pattern": 2, "num_experts": 8,
     "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 40,
     "mlp_layer_types": ["sparse", "dense", "sparse"]},
    (
        {"num_experts": 4, "n_group": 1, "topk_group": 1}, {"num_experts_per_tok": 1},
        {"n_group": 2, "topk_group": 1}, {"moe_intermediate_size": 24}, {"num_shared_experts": 2},
        {"routed_scaling_factor": 1.0}, {"norm_topk_prob": False},
        {"mlp_layer_types": None}, {"mlp_layer_types": None, "first_k_dense_replace": 2},
        {"sliding_window": 5}, {"sliding_window_pattern": None},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16},
    ),
    {"layer_types": ["mamba"], "sliding_window": 0, "mlp_layer_types": ["dense"],
     "num_experts_per_tok": 5, "n_group": 3, "topk_group": 5, "num_experts": 0,
     "num_shared_experts": 0, "norm_topk_prob": 1, "routed_scaling_factor": 0,
     "moe_intermediate_size": "x", "first_k_dense_replace": 4},
    {
        **GROUPED_ROUTER_FAULTS,
        "all layers rotated": ALL_ROTATED,
        "a longer window": fault("attn.core", windows=(30, None, 30)),
    },
    sizes=(*GQA_SIZES, {"num_hidden_layers": 2, "mlp_layer_types": ["sparse", "dense"]}),
    kv_tolerance=MOE_KV_TOLERANCE,
    gguf=GgufCase(
        "exaone-moe", gguf_facts, tensors=as_converted,
        changes={"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
)  # fmt: skip
