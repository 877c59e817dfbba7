"""Granite with windows."""

from __future__ import annotations

from typing import Any

from tests.models.expert_gguf import Tensors
from tests.models.families.granite import CASE as GRANITE
from tests.models.family_cases import ALL_ROTATED, GQA_SIZES, GgufCase, decoder_family, fault, times


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """Granite's keys, and which layers have a window and rotate."""
    assert GRANITE.gguf is not None
    bases = raw.get("layer_rope_theta")
    return {
        **GRANITE.gguf.facts(raw),
        "attention.sliding_window": raw["sliding_window"],
        "attention.sliding_window_pattern": [i % 4 != 0 for i in range(raw["num_hidden_layers"])],
        "attention.rope_pattern": None if bases is None else [base != 0 for base in bases],
    }


def as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """The sinks as a module's weight."""
    del raw
    out = {}
    for name, tensor in tensors.items():
        layer = name.removeprefix("model.layers.").partition(".")[0]
        out[f"blk.{layer}.attn_sinks.weight" if name.endswith("sinks") else name] = tensor
    return out


CASE = decoder_family(
    "granite_swa",
    {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
     "logits_scaling": 4.0, "sliding_window": 20, "num_hidden_layers": 3,
     "layer_rope_theta": [10000.0, 0, 10000.0]},
    (
        {"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": False}, {"head_dim": 16},
        {"sliding_window": 5}, {"layer_rope_theta": None}, {"layer_rope_theta": [0, 0, 300.0]},
        {"layer_rope_theta": [0, 0, 0]}, {"layer_rope_theta": [300.0, 0, 50.0]},
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        {"num_hidden_layers": 5, "layer_rope_theta": None},
    ),
    {"residual_multiplier": "0.5", "logits_scaling": 0.0, "attention_bias": 1,
     "layer_rope_theta": [0, 20.0, 30.0], "sliding_window": 0, "layer_types": ["mamba"],
     "rope_scaling": 5},
    {
        "no factor on scores": fault("attn.core", attention_scale=None),
        "branches x 1.05": fault("attn_post", branch_scale=times(1.05)),
        "a longer window": fault("attn.core", 1, windows=(None, 30, 20)),
        "all layers rotate": ALL_ROTATED,
    },
    sizes=(*GQA_SIZES, {"num_hidden_layers": 2, "layer_rope_theta": [10000.0, 0]}),
    gguf=GgufCase("granite_swa", gguf_facts, permuted=True, tensors=as_converted),
)  # fmt: skip
