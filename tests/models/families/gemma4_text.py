"""Gemma 4, text: every mechanism in one small model, some of its layers without a KV cache."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any

import torch

from modelmill.models._gemma4_config import Gemma4Config
from tests.models.family_cases import (
    NULL,
    ROTARY,
    SMALL,
    Change,
    FamilyCase,
    GgufCase,
    PlantedFault,
    based,
    changed,
    fault,
    times,
    with_scaling,
)
from tests.models.moe_faults import MOE_KV_TOLERANCE, one_fewer

FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL]
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 2000.0}
ROPE = {FULL: PROPORTIONAL, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
EXPERTS = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40,
}  # fmt: skip
NO_EXPERTS = dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"), NULL)
SIZES_BY_LAYER = {"1": {"head_dim": 24}, "3": {"head_dim": 24}, "5": {"head_dim": 24}}


class FirstCaches(Gemma4Config):
    """Layers that attend to the keys of the first layer of their type, not of the last."""

    @cached_property
    def last_kv_layer_by_windowed(self) -> dict[bool, int]:
        return {self.windows[i] is not None: i for i in reversed(range(self.first_kv_shared_layer))}


class OtherCaches(Gemma4Config):
    """Layers that attend to the keys of the layer before the last of their type."""

    @cached_property
    def last_kv_layer_by_windowed(self) -> dict[bool, int]:
        return {full: cache % 2 for full, cache in super().last_kv_layer_by_windowed.items()}


def as_class(cls: type[Gemma4Config]) -> Change:
    """The config as one of a class that answers otherwise."""
    return lambda config: cls(**{f.name: getattr(config, f.name) for f in fields(config)})


def with_router(**changes: Any) -> Change:
    """Changes the router of the experts beside the MLP."""
    return changed(router=changed(**changes))


def flipped(value: bool) -> bool:
    """The other one."""
    return not value


def gguf_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of its GGUF: sizes that differ by layer are arrays."""
    slides = [each == SLIDING for each in raw["layer_types"]]
    shared, inner = raw["num_kv_shared_layers"], raw["intermediate_size"]
    layers = len(slides)
    return {
        **{f"attention.{part}_length": raw["global_head_dim"] for part in ("key", "value")},
        **{f"attention.{part}_length_swa": raw["head_dim"] for part in ("key", "value")},
        "attention.layer_norm_rms_epsilon": raw.get("rms_norm_eps", 1e-6),
        "attention.head_count_kv": [
            raw["num_key_value_heads"] if each else raw["num_global_key_value_heads"]
            for each in slides
        ],
        "attention.sliding_window": raw["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": raw["hidden_size_per_layer_input"],
        "feed_forward_length": [inner * (1 + (i >= layers - shared)) for i in range(layers)],
        "rope.freq_base": raw["rope_parameters"][FULL]["rope_theta"],
        "rope.freq_base_swa": raw["rope_parameters"][SLIDING]["rope_theta"],
        "rope.dimension_count": raw["global_head_dim"],
        "rope.dimension_count_swa": raw["head_dim"],
        "expert_count": raw["num_experts"], "expert_used_count": raw["top_k_experts"],
        "expert_feed_forward_length": raw["moe_intermediate_size"],
    }  # fmt: skip


def as_converted(raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its tensors as the converter names them, where the package gguf has no name."""
    out = {}
    for name, each in tensors.items():
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if name.endswith("router.scale"):
            name = f"blk.{layer}.ffn_gate_inp.scale"
        elif name.endswith("per_expert_scale"):
            name = f"blk.{layer}.ffn_down_exps.scale"
        elif name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
            name += ".weight"
        out[name] = each
    pairs = raw["global_head_dim"] // 2
    turned = int(pairs * raw["rope_parameters"][FULL]["partial_rotary_factor"])
    out["rope_freqs.weight"] = torch.tensor([1.0] * turned + [1e30] * (pairs - turned))
    return out


CORE, EXPERT_ROUTING = "attn.core", "experts.moe.routing"
CASE = FamilyCase(
    "gemma4_text",
    {**SMALL, "num_hidden_layers": 6, "layer_types": TYPES, "head_dim": 16, "global_head_dim": 32,
     "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 20,
     "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 120,
     "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "rope_parameters": ROPE, **EXPERTS},
    (
        {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"hidden_size": 64},
        {"num_hidden_layers": 4, "layer_types": TYPES[:4], "num_kv_shared_layers": 1},
        {"num_attention_heads": 8}, {"intermediate_size": 72}, {"vocab_size": 96},
        {"max_position_embeddings": 128}, {"head_dim": 12}, {"global_head_dim": 16},
        {"num_global_key_value_heads": 2}, {"num_global_key_value_heads": None},
        {"per_layer_config": SIZES_BY_LAYER, "global_head_dim": None,
         "num_global_key_value_heads": None},
        {"attention_k_eq_v": False, "num_global_key_value_heads": None},
        {"attention_k_eq_v": None, "num_global_key_value_heads": None},
        {"sliding_window": 5}, {"layer_types": None, "num_kv_shared_layers": 0},
        {"layer_types": [FULL, SLIDING, FULL, FULL, SLIDING, FULL], "num_kv_shared_layers": 3},
        {"layer_types": [FULL] * 6},
        {"layer_types": [FULL] * 6, "rope_parameters": {FULL: PROPORTIONAL}},
        {"hidden_size_per_layer_input": 8},
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        {"vocab_size_per_layer_input": 130},
        {"num_kv_shared_layers": 0}, {"num_kv_shared_layers": None}, {"num_kv_shared_layers": 4},
        {"use_double_wide_mlp": False}, {"enable_moe_block": False, **NO_EXPERTS},
        {"enable_moe_block": None, **NO_EXPERTS},
        {"num_experts": 3, "top_k_experts": 3}, {"top_k_experts": 1}, {"moe_intermediate_size": 24},
        {"rope_parameters": ROPE | {FULL: PROPORTIONAL | {"partial_rotary_factor": 0.5}}},
        {"rope_parameters": ROPE | {FULL: PROPORTIONAL | {"factor": 2.0}}},
        {"rope_parameters": ROPE | {FULL: {"rope_type": "proportional", "rope_theta": 50.0}}},
        {"rope_parameters": {FULL: LINEAR, SLIDING: LLAMA3}}, {"rope_parameters": None},
        {"rope_parameters": {FULL: ROPE[SLIDING], SLIDING: PROPORTIONAL}},
        {"hidden_activation": "silu"}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": False},
        {"attention_bias": True}, {"final_logit_softcapping": 3.0},
        {"use_bidirectional_attention": "vision"},
        {"enable_moe_block": False, **NO_EXPERTS, "hidden_size_per_layer_input": 0,
         "num_kv_shared_layers": 0},
    ),
    {"is_encoder_decoder": True, "hidden_activation": "quick_gelu", "layer_types": ["mamba"],
     "attn_logit_softcapping": 30.0, "use_bidirectional_attention": "all", "sliding_window": 0,
     "rope_scaling": LINEAR,
     "final_logit_softcapping": -1, "attention_bias": 1, "attention_k_eq_v": 1,
     "rope_parameters": {"rope_type": "default"}, "num_kv_shared_layers": 6,
     "num_global_key_value_heads": 3, "global_head_dim": 7, "head_dim": 7,
     "per_layer_config": {"0": {"head_dim": 8}}, "use_double_wide_mlp": "x",
     "hidden_size_per_layer_input": -1, "vocab_size_per_layer_input": 100,
     "enable_moe_block": 1, "num_experts": 0, "top_k_experts": 5, "moe_intermediate_size": "x",
     "num_key_value_heads": 3, "rms_norm_eps": "x"},
    {
        "eps x 10": fault(("attn_norm.eps", "attn_post.eps"), eps=times(10)),
        "RoPE base of windows x 2": fault(ROTARY, local_rope=based(2.0)),
        "RoPE base x 2": fault(ROTARY, 1, rope=based(2.0)),
        "every pair turns": fault(ROTARY, 1, rope=with_scaling(partial_rotary_factor=1.0)),
        "twice as many pairs turn": fault(ROTARY, 1, rope=with_scaling(partial_rotary_factor=0.5)),
        "they turn half as fast": fault(ROTARY, 1, rope=with_scaling(factor=2.0)),
        "scores / sqrt(head_dim)": fault(CORE, attention_scale=0.25),
        "window + 1": fault(CORE, windows=(21, None, 21, None, 21, None)),
        "window - 1": fault(CORE, windows=(19, None, 19, None, 19, None)),
        "a longer window of a shared layer": fault(CORE, 4, windows=(20, None, 20, None, 30, None)),
        "keys of the first layer": PlantedFault(as_class(FirstCaches), (CORE,), 4),
        "keys of other layers": PlantedFault(as_class(OtherCaches), (CORE,), 4),
        "embeddings x 1.05": fault("embed", None, embedding_scale=times(1.05)),
        "eps of layer inputs x 10": fault("layer_inputs.norm.eps", None, inputs=changed(eps=1e-5)),
        "weights of experts not divided": fault(
            EXPERT_ROUTING, moe=with_router(renormalize=flipped)
        ),
        "one expert fewer": fault(EXPERT_ROUTING, moe=with_router(top_k=one_fewer)),
        "router without its factor": fault(
            "experts.moe.router", moe=with_router(logit_scale=1.0)
        ),
        "no cap": fault("head", None, case={"final_logit_softcapping": 3.0}, logit_softcap=None),
    },
    gguf=GgufCase("gemma4", gguf_facts, tensors=as_converted),
    kv_tolerance=MOE_KV_TOLERANCE,
    split_tolerance=2e-3,
)  # fmt: skip
