"""Granite with experts and an MLP beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.models.expert_gguf import Tensors
from tests.models.families import granitemoe
from tests.models.family_cases import GgufCase
from tests.models.moe_faults import moe_family


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of Granite with experts, and the channels of the MLP beside them."""
    beside = {"expert_shared_feed_forward_length": raw["shared_intermediate_size"]}
    return {**granitemoe.gguf_facts(raw), **beside}


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """The halves of its first matrix apart, too."""
    out = {}
    for name, tensor in granitemoe.as_converted(raw, tensors).items():
        if "shared_mlp.input_linear" not in name:
            out[name] = tensor
            continue
        layer = name.removeprefix("model.layers.").partition(".")[0]
        for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
            out[f"blk.{layer}.ffn_{part}_shexp.weight"] = half.contiguous()
    return out


CASE = replace(moe_family(
    "granitemoeshared",
    {"num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
     "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 4.0,
     "shared_intermediate_size": 24},
    (
        {"num_local_experts": 3, "num_experts_per_tok": 3}, {"attention_bias": True},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"embedding_multiplier": 1.0, "attention_multiplier": 0.3, "residual_multiplier": 1.0,
         "logits_scaling": 1.0},
        {"shared_intermediate_size": 40}, {"shared_intermediate_size": 0},
        {"shared_intermediate_size": None},
    ),
    {"num_experts_per_tok": 6, "num_local_experts": 0, "residual_multiplier": "x",
     "shared_intermediate_size": -1},
), gguf=GgufCase("granitemoe", gguf_facts, permuted=True, tensors=as_converted))  # fmt: skip
