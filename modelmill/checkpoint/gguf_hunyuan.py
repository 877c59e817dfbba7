"""GGUF architectures of Hunyuan: dense, with experts, and Hunyuan 3."""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import ArchitectureKeys, head_dim
from modelmill.checkpoint.gguf_families import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    GgufArchitecture,
    read_rms_config,
)
from modelmill.checkpoint.gguf_group_limited_experts import NEXTN_TENSORS, require_sigmoid_gating
from modelmill.core.errors import UnknownArchitecture

HUNYUAN_DENSE_NAMES = {
    **LLAMA_NAMES,
    "blk.attn_q_norm": "self_attn.query_layernorm",
    "blk.attn_k_norm": "self_attn.key_layernorm",
}
HUNYUAN_EXPERT_NAMES = {
    **EXPERT_NAMES,
    **{f"blk.ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
}
HUNYUAN_MOE_NAMES = {
    **HUNYUAN_DENSE_NAMES,
    **HUNYUAN_EXPERT_NAMES,
    "blk.ffn_gate_inp": "mlp.gate.wg",
}
HY_V3_NAMES = {
    **LLAMA_NAMES,
    **HUNYUAN_EXPERT_NAMES,
    "blk.ffn_gate_inp": "mlp.router.gate",
    "blk.exp_probs_b": "mlp.expert_bias",
    # of the layers of multi-token prediction, which are not used
    **{f"blk.nextn.{part}": part for part in NEXTN_TENSORS},
}


def _read_dense_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read the dense one; the file has the base of the rotation with ``alpha`` in it.

    The converter writes an original context length beside a scaling of type none.
    """
    keys.view.get(f"{keys.arch}.rope.scaling.original_context_length")
    return {
        **read_rms_config(keys),
        "head_dim": head_dim(keys),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
    }


def _read_moe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read the experts besides; the weights of a token's experts sum to 1."""
    return {
        **_read_dense_config(keys),
        "num_experts": keys.get_positive_int("expert_count"),
        "moe_topk": keys.get_positive_int("expert_used_count"),
        "moe_intermediate_size": keys.get_positive_int("expert_feed_forward_length"),
        "num_shared_expert": _count_shared_experts(
            keys, keys.get_positive_int("feed_forward_length")
        ),
    }


def _read_hy_v3_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Hunyuan 3, whose layers of multi-token prediction are counted among the blocks."""
    require_sigmoid_gating(keys)
    layers = keys.get_positive_int("block_count") - keys.get_positive_int("nextn_predict_layers", 0)
    inner = keys.get_positive_int("expert_feed_forward_length")
    keys.view.get(f"{keys.arch}.leading_dense_block_count")  # the tensors tell it
    return {
        **read_rms_config(keys),
        "num_hidden_layers": layers,
        "head_dim": head_dim(keys),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "num_experts": keys.get_positive_int("expert_count"),
        "num_experts_per_tok": keys.get_positive_int("expert_used_count"),
        "moe_intermediate_size": inner,
        "num_shared_experts": _count_shared_experts(keys, inner),
        "router_scaling_factor": keys.get_positive_float("expert_weights_scale", 1.0),
        "route_norm": keys.get_flag("expert_weights_norm", False),
        "mlp_layer_types": [
            "sparse" if keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") else "dense"
            for layer in range(layers)
        ],
    }


def _count_shared_experts(keys: ArchitectureKeys, inner: int) -> int:
    """Read how many experts every token has; the file has the width of all of them.

    Raises:
        UnknownArchitecture: for a width that is no multiple of one expert's.
    """
    keys.view.get(f"{keys.arch}.expert_shared_count")
    width = keys.get_positive_int("expert_shared_feed_forward_length", inner)
    if width % inner:
        raise UnknownArchitecture(
            f"{keys.raw.path}: has expert_shared_feed_forward_length {width}, which is no multiple "
            f"of an expert's {inner}"
        )
    return width // inner


HUNYUAN_ARCHITECTURES = {
    "hunyuan-dense": GgufArchitecture(
        HUNYUAN_DENSE_NAMES, model_type="hunyuan_v1_dense", read_config=_read_dense_config
    ),
    "hunyuan-moe": GgufArchitecture(
        HUNYUAN_MOE_NAMES, model_type="hunyuan_v1_moe", read_config=_read_moe_config
    ),
    "hy_v3": GgufArchitecture(HY_V3_NAMES, model_type="hy_v3", read_config=_read_hy_v3_config),
}
