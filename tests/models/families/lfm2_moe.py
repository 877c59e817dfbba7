"""LFM2 with experts."""

from __future__ import annotations

from typing import Any

from tests.models.expert_gguf import Tensors, expert_facts, stack_experts
from tests.models.families.lfm2 import LAYERS, ConvWithSilu
from tests.models.families.lfm2 import as_converted as convolutions_as_converted
from tests.models.family_cases import COMMON_SWITCHES, ROTARY, GgufCase, based, fault
from tests.models.moe_faults import SIGMOID_ROUTER_FAULTS, moe_family


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF."""
    return {
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.head_count_kv": [
            0 if each == "conv" else raw["num_key_value_heads"] for each in raw["layer_types"]
        ],
        "shortconv.l_cache": 3,
        "leading_dense_block_count": raw["num_dense_layers"],
        "expert_gating_func": 2,
        **expert_facts(raw),
    }


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """The convolutions as matrices, the experts in stacks."""
    out = convolutions_as_converted(raw, stack_experts(tensors))
    return {
        name.removeprefix("model.")
        if ".experts." in name
        else name.replace(".expert_bias", ".expert_bias.bias"): tensor
        for name, tensor in out.items()
    }


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
        **SIGMOID_ROUTER_FAULTS,
        "RoPE base x 2": fault(ROTARY, 1, rope=based(2.0)),
        "SiLU behind the convolution": fault(
            "attn.conv", recurrence=lambda spec: ConvWithSilu(**vars(spec))
        ),
    },
    sizes=tuple(
        each for each in COMMON_SWITCHES if "num_hidden_layers" not in each
    ),
    gguf=GgufCase(
        "lfm2moe", gguf_facts, tensors=as_converted,
        changes={"rope_theta": 10000.0, "num_hidden_layers": 3, "num_dense_layers": 1,
                 "layer_types": ["full_attention", "conv", "full_attention"]},
    ),
)  # fmt: skip
