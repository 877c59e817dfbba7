"""GGUFs of families with experts, as llama.cpp's converter leaves them: a stack of each matrix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


def stack_experts(tensors: Tensors) -> Tensors:
    """The experts of a layer in one tensor."""
    out: Tensors = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            out[name] = tensor
        else:
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    stacked = {
        name: torch.stack([each[i] for i in range(len(each))]) for name, each in stacks.items()
    }
    return out | stacked


def expert_facts(raw: Mapping[str, Any], experts: str = "num_experts") -> dict[str, Any]:
    """The numbers of experts."""
    return {
        "expert_count": raw[experts],
        "expert_used_count": raw["num_experts_per_tok"],
        "expert_feed_forward_length": raw["moe_intermediate_size"],
    }


def rename(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    """Tensors under GGUF's names; names: of a layer's modules, and of those outside."""
    out = {}
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(\.weight|\.bias)?", name)
        if layer is None:
            stem, _, suffix = name.rpartition(".")
            out[f"{names[stem]}.{suffix}"] = tensor
        else:
            out[f"blk.{layer[1]}.{names[layer[2]]}{layer[3] or ''}"] = tensor
    return out


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v")},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in ("q", "k")},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
