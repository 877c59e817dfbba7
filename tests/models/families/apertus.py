"""Apertus."""

from __future__ import annotations

from typing import Any

import torch

from modelmill.accept.reference.rope import ReferenceRope
from tests.models.family_cases import LLAMA3, GgufCase, decoder_family, rms_facts

SLOPES = ("alpha_p", "alpha_n", "beta", "eps")


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF."""
    original = LLAMA3["original_max_position_embeddings"]
    return {
        **rms_facts(raw), "rope.freq_base": LLAMA3["rope_theta"],
        "rope.scaling.original_context_length": original,
    }  # fmt: skip


def slopes(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """The numbers of the activation, which are metadata."""
    layers = sum(name.endswith(".act_fn.beta") for name in tensors)
    stem = "model.layers.{}.mlp.act_fn.{}"
    return {
        f"xielu.{slope}": [float(tensors[stem.format(i, slope)]) for i in range(layers)]
        for slope in SLOPES
    }


def as_converted(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the numbers of the activation, with the divisors of the rotation."""
    dim = raw["hidden_size"] // raw["num_attention_heads"]
    rope = ReferenceRope(dim, LLAMA3["rope_theta"], 256, "llama3", LLAMA3)
    plain = ReferenceRope(dim, LLAMA3["rope_theta"], 256)
    divisors = plain.frequencies(1, 1, torch.float64) / rope.frequencies(1, 1, torch.float64)
    matrices = {name: tensor for name, tensor in tensors.items() if ".act_fn." not in name}
    return matrices | {"rope_freqs.weight": divisors[0].float()}


CASE = decoder_family(
    "apertus",
    {"rope_parameters": LLAMA3},
    (
        {"rope_parameters": None}, {"rope_parameters": {}},
        {"attention_bias": True}, {"hidden_act": "relu2"}, {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}, {"head_dim": 16},
    ),
    {"attention_bias": 1, "head_dim": 7, "qk_norm": False, "post_norm": True},
    {},
    gguf=GgufCase("apertus", gguf_facts, tensors=as_converted, numbers=slopes),
)  # fmt: skip
