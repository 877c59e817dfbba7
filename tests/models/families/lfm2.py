"""LFM2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from modelmill.nn.causal_conv import CausalConvConfig
from modelmill.nn.short_conv import ShortConvSpec
from tests.models.family_cases import (
    EPS_FAULT,
    GQA_SIZES,
    ROTARY,
    FamilyCase,
    GgufCase,
    based,
    decoder_family,
    fault,
)

LAYERS = ["conv", "full_attention"]


class ConvWithSilu(ShortConvSpec):
    """A convolution with an activation."""

    @property
    def conv_config(self) -> CausalConvConfig:
        """The convolution."""
        return replace(super().conv_config, silu=True)


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF; the MLP's width is stored as it is."""
    multiple, inner = raw["block_multiple_of"], 2 * raw["intermediate_size"] // 3
    return {
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.head_count_kv": [
            0 if each == "conv" else raw["num_key_value_heads"] for each in raw["layer_types"]
        ],
        "feed_forward_length": -(-inner // multiple) * multiple,
        "shortconv.l_cache": 3,
    }


def as_converted(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The convolution as a matrix."""
    del raw
    return {
        name: each[:, 0].contiguous() if name.endswith(".conv.conv.weight") else each
        for name, each in tensors.items()
    }


CASE: FamilyCase = decoder_family(
    "lfm2",
    {"block_multiple_of": 16, "layer_types": LAYERS},
    (
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
        {"layer_types": None, "full_attn_idxs": [0]}, {"layer_types": None},
        {"norm_eps": 1e-3}, {"tie_word_embeddings": False}, {"tie_embedding": False},
        {"conv_bias": True}, {"conv_L_cache": 4}, {"head_dim": 16},
        {"block_auto_adjust_ff_dim": False}, {"block_ffn_dim_multiplier": 1.5},
        {"block_multiple_of": 24}, {"block_ff_dim": 96, "intermediate_size": None},
    ),
    {
        "conv_L_cache": 1, "conv_bias": 1, "layer_types": ["conv"], "block_multiple_of": 0,
        "block_ffn_dim_multiplier": 0, "block_auto_adjust_ff_dim": "yes", "tie_embedding": 1,
        "block_ff_dim": -1, "norm_eps": "x", "block_use_swiglu": False, "use_pos_enc": False,
    },
    {
        "RoPE base x 2": fault(ROTARY, 1, rope=based(2.0)),
        "eps x 10": EPS_FAULT,
        "SiLU behind the convolution": fault(
            "attn.conv", recurrence=lambda spec: ConvWithSilu(**vars(spec))
        ),
    },
    sizes=GQA_SIZES,
    gguf=GgufCase("lfm2", gguf_facts, tensors=as_converted, changes={"rope_theta": 10000.0}),
)  # fmt: skip
