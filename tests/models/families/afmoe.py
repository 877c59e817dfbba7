"""Arcee Trinity."""

from __future__ import annotations

from typing import Any

from tests.models.expert_gguf import Tensors, expert_facts, stack_experts
from tests.models.family_cases import (
    ALL_ROTATED,
    GQA_SIZES,
    GgufCase,
    fault,
    head_facts,
    rms_facts,
    times,
)
from tests.models.moe_faults import SIGMOID_ROUTER_FAULTS, moe_family

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF, which has neither the layer types nor the factor of the embeddings."""
    return {
        **rms_facts(raw),
        **expert_facts(raw),
        **head_facts(raw),
        "rope.dimension_count": raw["head_dim"],
        "attention.sliding_window": raw["sliding_window"],
        "leading_dense_block_count": raw["num_dense_layers"],
        "expert_shared_count": raw["num_shared_experts"],
        "expert_weights_norm": True,
        "expert_weights_scale": raw["route_scale"],
        "expert_gating_func": 2,
    }


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """The experts of a layer in one tensor, and the bias of their choice as a module's."""
    del raw
    return {
        name.replace(".expert_bias", ".expert_bias.bias"): tensor
        for name, tensor in stack_experts(tensors).items()
    }


CASE = moe_family(
    "afmoe",
    {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 12,
     "num_hidden_layers": 3, "num_dense_layers": 0, "sliding_window": 20, "layer_types": WINDOWS,
     "num_shared_experts": 1, "route_scale": 1.5, "mup_enabled": True},
    (
        {"num_experts": 4, "num_experts_per_tok": 3}, {"moe_intermediate_size": 24},
        {"num_shared_experts": 2}, {"num_shared_experts": None}, {"route_scale": 1.0},
        {"num_dense_layers": 2}, {"num_dense_layers": None}, {"mup_enabled": False},
        {"sliding_window": 5}, {"layer_types": None},
        {"layer_types": None, "global_attn_every_n_layers": 2}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 16},
        {"num_key_value_heads": None}, {"attention_bias": True},
    ),
    {"num_experts_per_tok": 7, "num_experts": "8", "moe_intermediate_size": 0,
     "num_shared_experts": 0, "route_scale": 0, "num_dense_layers": 4, "mup_enabled": 1,
     "layer_types": ["mamba"], "sliding_window": 0, "attention_bias": 1, "route_norm": False,
     "global_attn_every_n_layers": 0, "num_expert_groups": 2, "n_group": 2},
    {
        **SIGMOID_ROUTER_FAULTS,
        "eps x 10": fault(("attn_norm.eps", "attn_post.eps"), eps=times(10)),
        "all layers rotated": ALL_ROTATED,
        "a longer window": fault("attn.core", windows=(30, None, 30)),
        "embeddings without their factor": fault("embed", None, embedding_scale=None),
    },
    sizes=(*GQA_SIZES, {"num_hidden_layers": 2, "layer_types": None}),
    gguf=GgufCase(
        "afmoe", gguf_facts, tensors=as_converted,
        changes={"num_hidden_layers": 5, "layer_types": None, "num_dense_layers": 1,
                 "rms_norm_eps": 1e-5, "num_shared_experts": 2},
    ),
)  # fmt: skip
