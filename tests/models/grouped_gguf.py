"""GGUFs of families with grouped routers, as llama.cpp's converter leaves them."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.expert_gguf import Tensors, stack_experts
from tests.models.latent_faults import YARN

GGUF_YARN = YARN | {"mscale": 0.7}


def router_facts(raw: dict[str, Any], gating: int) -> dict[str, Any]:
    """Of the router."""
    return {
        "expert_count": raw["n_routed_experts"],
        "expert_used_count": raw["num_experts_per_tok"],
        "expert_shared_count": raw.get("n_shared_experts", 1),
        "expert_feed_forward_length": raw["moe_intermediate_size"],
        "leading_dense_block_count": raw.get("first_k_dense_replace", 0),
        "expert_gating_func": gating,
        "expert_weights_scale": raw.get("routed_scaling_factor", 2.5),
        "expert_weights_norm": raw.get("norm_topk_prob", gating == 2),
        "expert_group_count": raw.get("n_group", 1),
        "expert_group_used_count": raw.get("topk_group", 1),
    }


def stacked(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """The experts of a layer in one tensor, and the bias of their choice as a module's."""
    del raw
    return {
        name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor
        for name, tensor in stack_experts(tensors).items()
    }


def with_predicting_layer(raw: dict[str, Any], tensors: Tensors, like: int) -> Tensors:
    """A layer of multi-token prediction behind the others, with the tensors of one of them."""
    width, layer = raw["hidden_size"], raw["num_hidden_layers"]
    shapes = {"eh_proj": (width, 2 * width), **dict.fromkeys(("enorm", "hnorm"), (width,))}
    copies = {
        name.replace(f".layers.{like}.", f".layers.{layer}."): tensor.clone()
        for name, tensor in tensors.items()
        if f".layers.{like}." in name
    }
    own = {f"blk.{layer}.nextn.{n}.weight": torch.ones(shape) for n, shape in shapes.items()}
    return {**tensors, **copies, **own}


def predicting_layer_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """Of a layer of multi-token prediction, which is counted among the blocks."""
    return {"block_count": raw["num_hidden_layers"] + 1, "nextn_predict_layers": 1}


def latent_facts(raw: dict[str, Any], gating: int) -> dict[str, Any]:
    """Of the router, of latent attention in newer files, and YaRN."""
    return {**router_facts(raw, gating), **latent_attention_facts(raw)}


def latent_attention_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """Of latent attention in newer files, and YaRN."""
    rank, turned = raw["kv_lora_rank"], raw["qk_rope_head_dim"]
    scaling = raw["rope_scaling"]
    query = raw.get("q_lora_rank")
    return {
        **({} if query is None else {"attention.q_lora_rank": query}),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": raw["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": raw["v_head_dim"],
        "rope.dimension_count": turned,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling["factor"],
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(scaling["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(scaling["beta_slow"]),
        "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
    }


def latent_as_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """The up-projections of keys, transposed, and of values apart."""
    out = {}
    for name, tensor in stacked(raw, tensors).items():
        if "kv_b_proj" not in name:
            out[name] = tensor
            continue
        both = tensor.unflatten(0, (raw["num_attention_heads"], -1))
        keys, values = both.split([raw["qk_nope_head_dim"], raw["v_head_dim"]], 1)
        out[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2).contiguous()
        out[name.replace("kv_b_proj", "v_b_proj")] = values.contiguous()
    return out
