"""Granite 3 with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.models.families.granite import CASE as GRANITE
from tests.models.family_cases import GgufCase
from tests.models.moe_faults import moe_family


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """Granite's keys, and the numbers of experts."""
    assert GRANITE.gguf is not None
    return {
        **GRANITE.gguf.facts(raw),
        "expert_count": raw["num_local_experts"],
        "expert_used_count": raw["num_experts_per_tok"],
    }


def as_converted(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The halves of the experts' first matrices apart, each a stack."""
    out = {}
    for name, tensor in tensors.items():
        if "block_sparse_moe.input_linear" not in name:
            out[name] = tensor
            continue
        layer = name.removeprefix("model.layers.").partition(".")[0]
        for part, half in zip(
            ("gate", "up"), tensor.split(raw["intermediate_size"], 1), strict=True
        ):
            out[f"blk.{layer}.ffn_{part}_exps.weight"] = half.contiguous()
    return out


CASE = replace(moe_family(
    "granitemoe",
    {"num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
     "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 4.0},
    (
        {"num_local_experts": 3, "num_experts_per_tok": 3}, {"attention_bias": True},
        {"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True},
        {"embedding_multiplier": 1.0, "attention_multiplier": 0.3, "residual_multiplier": 1.0,
         "logits_scaling": 1.0},
    ),
    {"num_experts_per_tok": 6, "num_local_experts": 0, "residual_multiplier": "x"},
), gguf=GgufCase("granitemoe", gguf_facts, permuted=True, tensors=as_converted))  # fmt: skip
