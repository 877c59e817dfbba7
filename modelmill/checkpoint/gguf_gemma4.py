"""Gemma 4's GGUF: sizes that differ by layer are arrays, the still channels of a rotation a tensor.

``rope_freqs.weight`` divides the frequencies of layers with full attention: by 1 where channels
turn, by 1e30 where they do not. Gate and up projections of the experts are one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from modelmill.checkpoint.gguf_config import ArchitectureKeys
from modelmill.checkpoint.gguf_families import GEMMA_NAMES, GgufArchitecture
from modelmill.core.errors import CorruptCheckpoint, UnknownArchitecture

FUSED_GATE_UP_TENSOR = "blk.ffn_gate_up_exps"
"""The tensor of all experts' gate projections, each with its up projection behind it."""
MIN_UNROTATED_DIVISOR = 1e20  # a channel whose frequency is divided by more does not turn
GEMMA4_NAMES = {
    **GEMMA_NAMES,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "blk.inp_gate": "per_layer_input_gate",
    "blk.proj": "per_layer_projection",
    "blk.post_norm": "post_per_layer_input_norm",
    "blk.post_ffw_norm_1": "post_feedforward_layernorm_1",
    "blk.post_ffw_norm_2": "post_feedforward_layernorm_2",
    "blk.pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "blk.ffn_gate_inp": "router.proj",
    FUSED_GATE_UP_TENSOR: "experts.*.gate_up_proj",
    "blk.ffn_gate_exps": "experts.*.gate_proj",
    "blk.ffn_up_exps": "experts.*.up_proj",
    "blk.ffn_down_exps": "experts.*.down_proj",
    # whole names, of tensors that are no weight of a module
    "blk.layer_output_scale.weight": "layer_scalar",
    "blk.ffn_gate_inp.scale": "router.scale",
    "blk.ffn_down_exps.scale": "router.per_expert_scale",
}


def _read_count_per_layer(keys: ArchitectureKeys, key: str, layers: int) -> list[int]:
    """Read a count that is one number, or one for each layer."""
    value = keys.view.get(f"{keys.arch}.{key}")
    if not isinstance(value, np.ndarray | list):
        return [keys.get_positive_int(key)] * layers
    counts = [int(each) for each in value]
    if len(counts) != layers or min(counts) < 1:
        raise CorruptCheckpoint(
            f"{keys.raw.path}: the key {keys.arch}.{key} has {len(counts)} numbers for {layers} "
            "layers, or one below 1"
        )
    return counts


def _read_layer_types(keys: ArchitectureKeys, layers: int) -> list[str]:
    pattern = keys.view.get(f"{keys.arch}.attention.sliding_window_pattern")
    if not isinstance(pattern, np.ndarray | list) or len(pattern) != layers:
        raise CorruptCheckpoint(
            f"{keys.raw.path}: the key {keys.arch}.attention.sliding_window_pattern must have "
            f"one value for each of {layers} layers"
        )
    types = ["sliding_attention" if bool(each) else "full_attention" for each in pattern]
    if types[-1] != "full_attention":
        raise UnknownArchitecture(f"{keys.raw.path}: the last layer of a gemma4 has no window")
    return types


def _read_rope_parameters(keys: ArchitectureKeys, full_dim: int, dim: int) -> dict[str, Any]:
    """Read both rotations; every channel of layers with a window turns."""
    turned = (
        keys.get_positive_int("rope.dimension_count", full_dim),
        keys.get_positive_int("rope.dimension_count_swa", dim),
    )
    scaling = keys.view.get(f"{keys.arch}.rope.scaling.type", "none")
    if turned != (full_dim, dim) or scaling != "none":
        raise UnknownArchitecture(
            f"{keys.raw.path}: rotates {turned} channels of heads of {(full_dim, dim)}, or scales "
            "positions; a gemma4 turns all and scales none"
        )
    if not keys.has_tensor("rope_freqs.weight"):
        raise CorruptCheckpoint(f"{keys.raw.path}: has no rope_freqs.weight; convert it again")
    divisors = keys.raw.get("rope_freqs.weight").float().flatten().tolist()
    count = sum(each == 1.0 for each in divisors)
    expected = len(divisors) == full_dim // 2 and count > 0
    if not expected or any(each < MIN_UNROTATED_DIVISOR for each in divisors[count:]):
        raise UnknownArchitecture(
            f"{keys.raw.path}: rope_freqs.weight of a gemma4 has {full_dim // 2} values, 1 for the "
            "first and 1e30 for the others"
        )
    full = {
        "rope_type": "proportional",
        "partial_rotary_factor": count / len(divisors),
        "rope_theta": keys.get_positive_float("rope.freq_base"),
    }
    theta = keys.get_positive_float("rope.freq_base_swa")
    return {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }


def _read_mlp_size_config(keys: ArchitectureKeys, layers: int, shared: int) -> dict[str, Any]:
    """Read the MLPs' channels: of layers without keys of their own perhaps twice as many."""
    sizes = _read_count_per_layer(keys, "feed_forward_length", layers)
    front, behind = set(sizes[: layers - shared]), set(sizes[layers - shared :])
    inner = sizes[0]
    if front != {inner} or not (behind <= {inner} or behind == {2 * inner}):
        raise UnknownArchitecture(
            f"{keys.raw.path}: feed_forward_length differs by layer in a way that is not known"
        )
    return {"intermediate_size": inner, "use_double_wide_mlp": behind == {2 * inner}}


def _require_all_equal(keys: ArchitectureKeys, what: str, values: Sequence[int]) -> int:
    if len(set(values)) != 1:
        raise UnknownArchitecture(f"{keys.raw.path}: {what} differ among layers of one type")
    return values[0]


def _read_moe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    if not keys.has_tensor("blk.0.ffn_gate_inp.weight"):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": keys.get_positive_int("expert_count"),
        "top_k_experts": keys.get_positive_int("expert_used_count"),
        "moe_intermediate_size": keys.get_positive_int("expert_feed_forward_length"),
    }


def _read_per_layer_input_sizes(keys: ArchitectureKeys) -> dict[str, Any]:
    width = keys.view.get(f"{keys.arch}.embedding_length_per_layer_input", 0)
    if width == 0:
        return {"hidden_size_per_layer_input": 0}
    table = "per_layer_token_embd.weight"
    if not keys.has_tensor(table):
        raise CorruptCheckpoint(f"{keys.raw.path}: has no {table}")
    return {
        "hidden_size_per_layer_input": keys.get_positive_int("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": keys.raw.tensor_info(table).shape[0],
    }


def read_gemma4_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Return what config.json would have."""
    layers = keys.get_positive_int("block_count")
    types = _read_layer_types(keys, layers)
    full = [index for index, each in enumerate(types) if each == "full_attention"]
    slides = [index for index in range(layers) if index not in full]
    full_dim = keys.get_positive_int("attention.key_length")
    dim = keys.get_positive_int("attention.key_length_swa")
    sizes = [keys.get_positive_int(f"attention.value_length{each}") for each in ("", "_swa")]
    if sizes != [full_dim, dim]:
        raise UnknownArchitecture(f"{keys.raw.path}: heads of a gemma4 have keys as long as values")
    kv_heads = _read_count_per_layer(keys, "attention.head_count_kv", layers)
    full_heads = _require_all_equal(keys, "KV heads", [kv_heads[index] for index in full])
    own = (
        _require_all_equal(keys, "KV heads", [kv_heads[index] for index in slides])
        if slides
        else full_heads
    )
    shared = keys.get_positive_int("attention.shared_kv_layers", 0)
    has_values = [
        keys.has_tensor(f"blk.{index}.attn_v.weight") for index in full if index < layers - shared
    ]
    softcap = keys.view.get(f"{keys.arch}.final_logit_softcapping")
    return {
        "hidden_size": keys.get_positive_int("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": keys.get_positive_int("attention.head_count"),
        "num_key_value_heads": own,
        "head_dim": dim,
        "per_layer_config": {
            str(index): {"num_key_value_heads": full_heads, "head_dim": full_dim} for index in full
        },
        "attention_k_eq_v": not any(has_values),
        "max_position_embeddings": keys.get_positive_int("context_length"),
        "rms_norm_eps": keys.get_positive_float("attention.layer_norm_rms_epsilon"),
        "layer_types": types,
        "sliding_window": keys.get_positive_int("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "rope_parameters": _read_rope_parameters(keys, full_dim, dim),
        "final_logit_softcapping": None
        if softcap is None
        else keys.get_positive_float("final_logit_softcapping"),
        **_read_mlp_size_config(keys, layers, shared),
        **_read_moe_config(keys),
        **_read_per_layer_input_sizes(keys),
    }


GEMMA4_ARCHITECTURES = {
    "gemma4": GgufArchitecture(
        GEMMA4_NAMES, model_type="gemma4_text", read_config=read_gemma4_config
    )
}
