"""GGUFs of Mellum 2: experts, and windows in some layers."""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import (
    SLIDING_WINDOW_KEY,
    ArchitectureKeys,
    head_dim,
    read_window_layer_types,
)
from modelmill.checkpoint.gguf_families import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    GgufArchitecture,
    read_rms_config,
)

MELLUM_NAMES = {
    **{
        gguf: name
        for gguf, name in LLAMA_NAMES.items()
        if gguf not in ("blk.ffn_gate", "blk.ffn_up", "blk.ffn_down")
    },
    "blk.ffn_gate_inp": "mlp.gate",
    **EXPERT_NAMES,
}


def _read_mellum_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Mellum; layers with a window are not scaled, as llama.cpp has it fixed."""
    config = read_rms_config(keys)
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")
    local = keys.get_positive_float("rope.freq_base_swa", theta)
    keys.view.get(f"{keys.arch}.feed_forward_length")  # of an MLP that no layer has
    layers = config["num_hidden_layers"]
    return {
        **config,
        "head_dim": head_dim(keys),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
        "sliding_window": keys.get_positive_int(SLIDING_WINDOW_KEY)
        if SLIDING_WINDOW_KEY in keys
        else None,
        "layer_types": read_window_layer_types(keys, layers),
        "num_experts": keys.get_positive_int("expert_count"),
        "num_experts_per_tok": keys.get_positive_int("expert_used_count"),
        "moe_intermediate_size": keys.get_positive_int("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


MELLUM_ARCHITECTURES = {"mellum": GgufArchitecture(MELLUM_NAMES, read_config=_read_mellum_config)}
