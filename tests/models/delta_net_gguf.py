"""GGUFs of families with Gated DeltaNet, as llama.cpp's converter leaves them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from tests.models.family_cases import FamilyCase, GgufCase, head_facts, rms_facts

Tensors = dict[str, torch.Tensor]
GGUF_CHANGES: dict[str, Any] = {"num_hidden_layers": 3, "full_attention_interval": 3,
                                "linear_num_value_heads": 6, "linear_value_head_dim": 12,
                                "rms_norm_eps": 1e-6}  # fmt: skip


def state_facts(raw: dict[str, Any]) -> dict[str, Any]:
    """The keys of a recurrence, and of heads that rotate in part."""
    facts = {
        **rms_facts(raw),
        **head_facts(raw),
        "rope.dimension_count": raw["head_dim"] // 4,
        "ssm.conv_kernel": raw.get("linear_conv_kernel_dim", 4),
        "ssm.state_size": raw["linear_key_head_dim"],
        "ssm.group_count": raw["linear_num_key_heads"],
        "ssm.time_step_rank": raw["linear_num_value_heads"],
        "ssm.inner_size": raw["linear_value_head_dim"] * raw["linear_num_value_heads"],
        "full_attention_interval": raw["full_attention_interval"],
    }
    if "num_experts" not in raw:
        return facts
    return {
        **facts,
        "expert_count": raw["num_experts"],
        "expert_used_count": raw["num_experts_per_tok"],
        "expert_feed_forward_length": raw["moe_intermediate_size"],
        "expert_shared_feed_forward_length": raw["shared_expert_intermediate_size"],
    }


def facts_3_5(raw: dict[str, Any]) -> dict[str, Any]:
    """Qwen3.5's keys besides; a layer that predicts is counted among the blocks."""
    return {
        **state_facts(raw),
        "rope.dimension_sections": [11, 11, 10, 0],
        "block_count": raw["num_hidden_layers"] + 1,
        "nextn_predict_layers": 1,
        **({"feed_forward_length": None} if "num_experts" in raw else {}),
    }


def converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """Norms plus 1, decays, the convolution as a matrix, the experts of a layer in one tensor."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(".A_log"):
            out[name] = -tensor.exp()
        elif name.endswith(".dt_bias"):
            out[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
        elif name.endswith(".conv1d.weight"):
            out[name] = tensor[:, 0].contiguous()
        elif name.endswith("norm.weight") and ".linear_attn." not in name:
            out[name] = tensor + 1
        elif (expert := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)) is None:
            out[name] = tensor
        elif expert[2] == "0":
            numbers = range(raw["num_experts"])
            each = [tensors[f"{expert[1]}.{number}{expert[3]}"] for number in numbers]
            out[f"{expert[1]}{expert[3]}"] = torch.stack(each)
    return out


def qwen3_next_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """q, k and v of all heads in one matrix, z in another; b and a stay by head of keys."""
    dim, keys = raw["linear_key_head_dim"], raw["linear_num_key_heads"]
    values = raw["linear_num_value_heads"] // keys * raw["linear_value_head_dim"]
    out = {}
    for name, tensor in converted(raw, tensors).items():
        if not name.endswith(".in_proj_qkvz.weight"):
            out[name] = tensor
            continue
        layer = name.split(".")[2]
        parts = tensor.unflatten(0, (keys, -1)).split([dim, dim, values, values], 1)
        q, k, v, z = (part.flatten(0, 1) for part in parts)
        out[f"blk.{layer}.attn_qkv.weight"] = torch.cat((q, k, v))
        out[f"blk.{layer}.attn_gate.weight"] = z.contiguous()
    return out


def qwen3_5_converted(raw: dict[str, Any], tensors: Tensors) -> Tensors:
    """Heads of values tiled over those of keys, and a layer that predicts."""
    out = {}
    first = 2 * raw["linear_num_key_heads"] * raw["linear_key_head_dim"]

    def tiled(tensor: torch.Tensor) -> torch.Tensor:
        keys = raw["linear_num_key_heads"]
        by_key = tensor.unflatten(0, (keys, raw["linear_num_value_heads"] // keys, -1))
        return by_key.transpose(0, 1).flatten(0, 2).contiguous()

    for name, tensor in converted(raw, tensors).items():
        part = name.partition(".linear_attn.")[2]
        if not part or part == "norm.weight":
            out[name] = tensor
        elif part == "out_proj.weight":
            out[name] = tiled(tensor.T).T.contiguous()
        elif part in ("in_proj_qkv.weight", "conv1d.weight"):
            out[name] = torch.cat((tensor[:first], tiled(tensor[first:])))
        else:
            out[name] = tiled(tensor)
    layer, width = raw["num_hidden_layers"], raw["hidden_size"]
    predicting = {"nextn.eh_proj": (width, 2 * width), "nextn.enorm": (width,),
                  "attn_q": (8, width)}  # fmt: skip
    return out | {
        f"blk.{layer}.{name}.weight": torch.zeros(shape) for name, shape in predicting.items()
    }


def with_gguf(case: FamilyCase, architecture: str) -> FamilyCase:
    """The family with its GGUF."""
    is_next = architecture == "qwen3next"
    return replace(case, gguf=GgufCase(
        architecture,
        state_facts if is_next else facts_3_5,
        changes=GGUF_CHANGES,
        tensors=qwen3_next_converted if is_next else qwen3_5_converted,
    ))  # fmt: skip
