"""Mellum 2."""

from __future__ import annotations

from typing import Any

from tests.models.expert_gguf import GGUF_NAMES, expert_facts, rename, stack_experts
from tests.models.family_cases import (
    GQA_SIZES,
    ROTARY,
    GgufCase,
    based,
    fault,
    head_facts,
    rms_facts,
)
from tests.models.moe_faults import MOE_FAULTS, moe_family

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

NAMES = {**GGUF_NAMES, "mlp.gate": "ffn_gate_inp"}


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF."""
    full, local = (raw["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    return {
        **rms_facts(raw),
        "attention.layer_norm_rms_epsilon": 1e-6,
        **expert_facts(raw),
        **head_facts(raw),
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": local["rope_theta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": full["factor"],
        "rope.scaling.original_context_length": full["original_max_position_embeddings"],
        "attention.sliding_window": raw["sliding_window"],
        "attention.sliding_window_pattern": [
            each == "sliding_attention" for each in raw["layer_types"]
        ],
    }


CASE = moe_family(
    "mellum",
    {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 12,
     "num_hidden_layers": 3, "sliding_window": 24,
     "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    (
        {"num_experts": 4, "num_experts_per_tok": 3}, {"norm_topk_prob": False},
        {"moe_intermediate_size": 24}, {"attention_bias": True}, {"sliding_window": 5},
        {"layer_types": None}, {"layer_types": ["full_attention"] * 3},
        {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        {"mlp_layer_types": ["sparse", "dense", "dense"]},
        {"rope_parameters": {"full_attention": YARN | {"rope_theta": 300.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 200.0}}},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"head_dim": 16},
    ),
    {"num_experts_per_tok": 7, "num_experts": "8", "norm_topk_prob": 1, "sliding_window": 0,
     "mlp_layer_types": ["mixed"] * 3, "moe_intermediate_size": 0, "layer_types": ["mamba"],
     "attention_bias": 1, "rope_scaling": YARN},
    {
        **MOE_FAULTS,
        "RoPE base x 2": fault(ROTARY, 1, rope=based(2.0)),
        "RoPE base of windows x 2": fault(ROTARY, local_rope=based(2.0)),
        "one rotation for all": fault(ROTARY, local_rope=None),
        "a longer window": fault("attn.core", windows=(34, None, 24)),
    },
    ropes=(),
    sizes=(
        *GQA_SIZES,
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    gguf=GgufCase(
        "mellum", gguf_facts, tensors=lambda _, tensors: rename(stack_experts(tensors), NAMES),
        changes={"rope_parameters": {
            "full_attention": YARN | {"rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
        }},
    ),
    unnamed_fields=frozenset({"num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types"}),
)  # fmt: skip
