"""Hunyuan 3."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.expert_gguf import GGUF_NAMES, Tensors, expert_facts, rename, stack_experts
from tests.models.family_cases import GQA_SIZES, GgufCase, head_facts, rms_facts
from tests.models.grouped_gguf import predicting_layer_facts
from tests.models.moe_faults import SIGMOID_ROUTER_FAULTS, moe_family

NAMES = {**GGUF_NAMES, "mlp.router.gate": "ffn_gate_inp", "mlp.expert_bias": "exp_probs_b"}


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF; a layer that predicts is counted among the blocks."""
    return {
        **rms_facts(raw),
        **expert_facts(raw),
        **head_facts(raw),
        "rope.freq_base": 11158840.0,
        **predicting_layer_facts(raw),
        "leading_dense_block_count": 1,
        "expert_shared_count": raw["num_shared_experts"],
        "expert_shared_feed_forward_length": (
            raw["num_shared_experts"] * raw["moe_intermediate_size"]
        ),
        "expert_weights_norm": True,
        "expert_weights_scale": 2.826,
        "expert_gating_func": 2,
    }


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """Under GGUF's names, with a layer that predicts."""
    width, layer = raw["hidden_size"], raw["num_hidden_layers"]
    predicting = {
        name.replace("blk.1.", f"blk.{layer}."): tensor
        for name, tensor in rename(stack_experts(tensors), NAMES).items()
        if name.startswith("blk.1.")
    }
    for part, shape in {"eh_proj": (width, 2 * width), "enorm": (width,), "hnorm": (width,),
                        "shared_head_norm": (width,)}.items():  # fmt: skip
        predicting[f"blk.{layer}.nextn.{part}.weight"] = torch.ones(shape)
    return {**rename(stack_experts(tensors), NAMES), **predicting}


CASE = moe_family(
    "hy_v3",
    {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 12,
     "mlp_layer_types": ["sparse", "sparse"]},
    (
        {"num_experts": 4, "num_experts_per_tok": 3},
        {"num_experts": None, "num_local_experts": 5}, {"moe_intermediate_size": 24},
        {"num_shared_experts": 2}, {"router_scaling_factor": 1.0},
        {"mlp_layer_types": ["sparse", "dense"]}, {"mlp_layer_types": None},
        {"enable_moe_fp32_combine": False}, {"attention_bias": True}, {"mlp_bias": True},
        {"mlp_bias": True, "mlp_layer_types": None}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {"num_experts_per_tok": 7, "num_experts": "8", "moe_intermediate_size": 0,
     "num_shared_experts": 0, "router_scaling_factor": 0, "mlp_layer_types": ["dense"],
     "attention_bias": 1, "mlp_bias": 1, "qk_norm": False, "route_norm": False,
     "first_k_dense_replace": 3},
    SIGMOID_ROUTER_FAULTS,
    sizes=(*GQA_SIZES, {"num_hidden_layers": 3, "mlp_layer_types": None}),
    gguf=GgufCase(
        "hy_v3", gguf_facts, tensors=as_converted,
        changes={"mlp_layer_types": ["dense", "sparse"], "num_shared_experts": 2},
    ),
)  # fmt: skip
