"""Granite 4."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.families import granite, granitemoe, mamba2
from tests.models.family_cases import (
    COMMON_SWITCHES,
    EPS_FAULT,
    REFUSED,
    SMALL,
    FamilyCase,
    GgufCase,
    changed,
    fault,
)
from tests.models.moe_faults import MOE_FAULTS, MOE_KV_TOLERANCE

LAYERS = ["mamba", "attention"]


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """Granite's keys, the state's, and the KV heads of each layer."""
    assert granite.CASE.gguf is not None
    inner = raw.get("mamba_expand", 2) * raw["hidden_size"]
    experts = raw["num_local_experts"]
    return {
        **granite.CASE.gguf.facts(raw),
        "attention.head_count_kv": [
            raw["num_key_value_heads"] if each == "attention" else 0 for each in raw["layer_types"]
        ],
        "context_length": 1 << 20,
        "expert_count": experts, "expert_used_count": raw["num_experts_per_tok"],
        "expert_shared_feed_forward_length": raw["shared_intermediate_size"],
        "rope.scaling.finetuned": raw["position_embedding_type"] == "rope",
        "rope.dimension_count": raw["hidden_size"] // raw["num_attention_heads"],
        "ssm.conv_kernel": 4, "ssm.inner_size": inner, "ssm.state_size": raw["mamba_d_state"],
        "ssm.time_step_rank": raw["mamba_n_heads"], "ssm.group_count": raw.get("mamba_n_groups", 1),
    }  # fmt: skip


def as_converted(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As of Mamba2 and of Granite's experts; the MLP's gate and up apart."""
    beside = "_shexp" if raw["num_local_experts"] else ""
    out = {}
    mixers = mamba2.as_converted({"n_groups": raw.get("mamba_n_groups", 1)}, {
        name.replace(".mamba.", ".mixer."): each for name, each in tensors.items()
    })  # fmt: skip
    mixers = {name.replace(".mixer.", ".mamba."): each for name, each in mixers.items()}
    for name, tensor in granitemoe.as_converted(raw, mixers).items():
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if "shared_mlp.input_linear" in name:
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                out[f"blk.{layer}.ffn_{part}{beside}.weight"] = half.contiguous()
        elif "shared_mlp.output_linear" in name:
            out[f"blk.{layer}.ffn_down{beside}.weight"] = tensor
        else:
            out[name] = tensor
    return out


CASE = FamilyCase(
    "granitemoehybrid",
    {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
     "attention_multiplier": 0.2, "residual_multiplier": 0.9, "logits_scaling": 4.0,
     "shared_intermediate_size": 40, "mamba_n_heads": 8, "mamba_d_state": 16, "layer_types": LAYERS,
     "position_embedding_type": "nope"},
    (
        *(each for each in COMMON_SWITCHES if "num_hidden_layers" not in each),
        {"num_hidden_layers": 3, "layer_types": ["mamba", "mamba", "attention"]},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"position_embedding_type": "rope"},
        {"position_embedding_type": "rope",
         "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"num_local_experts": 0}, {"num_local_experts": 3, "num_experts_per_tok": 3},
        {"attention_bias": True}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"embedding_multiplier": 1.0, "attention_multiplier": 0.3, "residual_multiplier": 1.0,
         "logits_scaling": 1.0},
        {"shared_intermediate_size": 24}, {"mamba_n_heads": 4, "mamba_d_head": 24},
        {"mamba_n_groups": 2}, {"mamba_d_state": 8}, {"mamba_d_conv": 3}, {"mamba_expand": 4},
        {"mamba_conv_bias": False}, {"mamba_proj_bias": True}, {"mamba_chunk_size": 16},
        {"time_step_limit": [0.4, 0.9]},
    ),
    {**REFUSED, "hidden_act": "gelu", "num_experts_per_tok": 6, "residual_multiplier": "x",
     "mamba_n_heads": 7, "mamba_d_head": 13, "mamba_n_groups": 3, "mamba_d_state": 0,
     "mamba_d_conv": 1, "mamba_expand": 0, "mamba_conv_bias": 1, "mamba_proj_bias": 1,
     "time_step_limit": [1.0], "position_embedding_type": "alibi", "layer_types": ["mamba"]},
    {
        **MOE_FAULTS,
        "eps x 10": EPS_FAULT,
        "steps limited": fault("attn.ssm", recurrence=changed(dt_limit=(0.0, 0.5))),
        "residual multiplier": fault("attn_post", branch_scale=0.95),
    },
    kv_tolerance=MOE_KV_TOLERANCE,
    gguf=GgufCase(
        "granitehybrid", gguf_facts, permuted=True, tensors=as_converted,
        changes={"rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
