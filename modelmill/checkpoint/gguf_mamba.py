"""GGUF architectures with Mamba2: their keys, and tensors with other values or shapes there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from modelmill.checkpoint.gguf_config import MAX_COUNT, ArchitectureKeys, array_as_list
from modelmill.checkpoint.gguf_families import (
    GRANITE_MOE_NAMES,
    LLAMA_NAMES,
    GgufArchitecture,
    read_granite_multipliers,
    read_rms_config,
)
from modelmill.core.errors import CorruptCheckpoint, UnknownArchitecture

Shape = tuple[int, ...]


def mamba_mixer_names(stem: str) -> dict[str, str]:
    """Return the names of a recurrence whose tensors' names begin with ``stem``."""
    return {
        "blk.ssm_in": f"{stem}.in_proj",
        "blk.ssm_conv1d": f"{stem}.conv1d",
        "blk.ssm_dt.bias": f"{stem}.dt_bias",
        "blk.ssm_a": f"{stem}.A_log",
        "blk.ssm_d": f"{stem}.D",
        "blk.ssm_norm": f"{stem}.norm",
        "blk.ssm_out": f"{stem}.out_proj",
    }


MAMBA2_NAMES = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "blk.attn_norm": "norm",
    **mamba_mixer_names("mixer"),
}
GRANITE_HYBRID_NAMES = {
    **GRANITE_MOE_NAMES,
    **mamba_mixer_names("mamba"),
    # the MLP without experts beside it
    "blk.ffn_gate": "shared_mlp.input_linear.gate",
    "blk.ffn_up": "shared_mlp.input_linear.up",
    "blk.ffn_down": "shared_mlp.output_linear",
}
FALCON_H1_NAMES = {
    **LLAMA_NAMES,
    **mamba_mixer_names("mamba"),
    "output_norm": "model.final_layernorm",
    "blk.ffn_norm": "pre_ff_layernorm.weight",  # the file names it without a suffix
    **{f"blk.ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}


@dataclass(frozen=True)
class ConverterInverse:
    """How a tensor was before the converter changed it.

    Attributes:
        shape: Its shape there, from that in the file.
        values: Its values, from those in the file, in either shape.
    """

    shape: Callable[[Shape], Shape]
    values: Callable[[torch.Tensor], torch.Tensor]


def _flat_shape(shape: Shape) -> Shape:
    return (torch.Size(shape).numel(),)


def _depthwise_conv_shape(shape: Shape) -> Shape:
    """Conv1d's [C, 1, K] from the [C, K] that the file has: each channel by itself."""
    return (shape[0], 1, shape[1]) if len(shape) == 2 else shape


def _identity_transform(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


CONVERTER_INVERSES: Mapping[str, ConverterInverse] = MappingProxyType(
    {
        # A itself, a column; a value that is no decay becomes NaN, which a build refuses
        "blk.ssm_a": ConverterInverse(_flat_shape, lambda tensor: (-tensor.float()).log()),
        "blk.ssm_d": ConverterInverse(_flat_shape, _identity_transform),
        "blk.ssm_norm": ConverterInverse(_flat_shape, _identity_transform),
        "blk.ssm_conv1d": ConverterInverse(_depthwise_conv_shape, _identity_transform),
        "blk.shortconv.conv": ConverterInverse(_depthwise_conv_shape, _identity_transform),
    }
)
"""By GGUF's name without the layer's number."""


def _read_expand_heads_head_dim(keys: ArchitectureKeys) -> tuple[int, int, int]:
    """Read how often the inner channels are the width, the heads, and the channels of each."""
    hidden, inner = (
        keys.get_positive_int("embedding_length"),
        keys.get_positive_int("ssm.inner_size"),
    )
    heads = keys.get_positive_int("ssm.time_step_rank")
    if inner % hidden or inner % heads:
        raise UnknownArchitecture(
            f"{keys.raw.path}: has ssm.inner_size {inner}, which is no multiple of "
            f"embedding_length {hidden} and of the {heads} heads of ssm.time_step_rank"
        )
    return inner // hidden, heads, inner // heads


def _read_mamba2_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Mamba2; the file has no bound of the time steps."""
    expand, heads, dim = _read_expand_heads_head_dim(keys)
    for idle in ("feed_forward_length", "attention.head_count", "attention.head_count_kv"):
        keys.view.get(f"{keys.arch}.{idle}")  # the model has none
    return {
        "hidden_size": keys.get_positive_int("embedding_length"),
        "num_hidden_layers": keys.get_positive_int("block_count"),
        "expand": expand,
        "num_heads": heads,
        "head_dim": dim,
        "state_size": keys.get_positive_int("ssm.state_size"),
        "n_groups": keys.get_positive_int("ssm.group_count", 1),
        "conv_kernel": keys.get_positive_int("ssm.conv_kernel"),
        "layer_norm_epsilon": keys.get_positive_float("attention.layer_norm_rms_epsilon"),
        "use_bias": keys.has_tensor("blk.0.ssm_in.bias"),
        "use_conv_bias": keys.has_tensor("blk.0.ssm_conv1d.bias"),
    }


def read_kv_heads_per_layer(keys: ArchitectureKeys) -> list[int]:
    """Read the KV heads of each layer; a recurrence has none."""
    layers, key = keys.get_positive_int("block_count"), f"{keys.arch}.attention.head_count_kv"
    stored = keys.view.get(key)
    listed = array_as_list(stored)
    counts = listed if isinstance(listed, list) else []
    are_counts = all(type(each) is int and 0 <= each <= MAX_COUNT for each in counts)
    if not are_counts or len(counts) != layers or 0 not in counts or len(set(counts)) != 2:
        raise CorruptCheckpoint(
            f"{keys.raw.path}: the key {key} must have a number for each of the {layers} layers, "
            f"0 for a recurrence and else always the same; it is {str(stored)[:60]}"
        )
    return counts


def _read_granite_hybrid_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Granite 4: layers without KV heads are recurrences."""
    layers, kv_heads = keys.get_positive_int("block_count"), read_kv_heads_per_layer(keys)
    expand, heads, dim = _read_expand_heads_head_dim(keys)
    first, attention = kv_heads.index(0), kv_heads.index(max(kv_heads))
    experts = keys.get_positive_int("expert_count", 0)
    keys.view.get(f"{keys.arch}.rope.dimension_count")  # all channels, where they rotate
    rotates = keys.get_flag("rope.scaling.finetuned", False)
    config = {
        "hidden_size": keys.get_positive_int("embedding_length"),
        "intermediate_size": keys.get_positive_int("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": keys.get_positive_int("attention.head_count"),
        "num_key_value_heads": max(kv_heads),
        "max_position_embeddings": keys.get_positive_int("context_length"),
        "rms_norm_eps": keys.get_positive_float("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.get_positive_float("rope.freq_base", 10000.0),
        "position_embedding_type": "rope" if rotates else "nope",
        "attention_bias": keys.has_tensor(f"blk.{attention}.attn_q.bias"),
        "layer_types": ["attention" if each else "mamba" for each in kv_heads],
        "num_local_experts": experts,
        "shared_intermediate_size": keys.get_positive_int("expert_shared_feed_forward_length"),
        **read_granite_multipliers(keys),
        "mamba_expand": expand,
        "mamba_n_heads": heads,
        "mamba_d_head": dim,
        "mamba_d_state": keys.get_positive_int("ssm.state_size"),
        "mamba_n_groups": keys.get_positive_int("ssm.group_count"),
        "mamba_d_conv": keys.get_positive_int("ssm.conv_kernel"),
        "mamba_proj_bias": keys.has_tensor(f"blk.{first}.ssm_in.bias"),
        "mamba_conv_bias": keys.has_tensor(f"blk.{first}.ssm_conv1d.bias"),
    }
    if experts:
        config["num_experts_per_tok"] = keys.get_positive_int("expert_used_count")
    return config


def _read_falcon_h1_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read Falcon-H1, whose multipliers are in the weights; a norm stands behind the gate."""
    inner, heads = (
        keys.get_positive_int("ssm.inner_size"),
        keys.get_positive_int("ssm.time_step_rank"),
    )
    return {
        **read_rms_config(keys),
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_gate.bias"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_state": keys.get_positive_int("ssm.state_size"),
        "mamba_n_groups": keys.get_positive_int("ssm.group_count"),
        "mamba_d_conv": keys.get_positive_int("ssm.conv_kernel"),
        "mamba_proj_bias": keys.has_tensor("blk.0.ssm_in.bias"),
        "projectors_bias": keys.has_tensor("blk.0.ssm_out.bias"),
        "mamba_conv_bias": keys.has_tensor("blk.0.ssm_conv1d.bias"),
        "mamba_rms_norm": keys.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


MAMBA_ARCHITECTURES = {
    "mamba2": GgufArchitecture(MAMBA2_NAMES, "backbone.layers", read_config=_read_mamba2_config),
    "granitehybrid": GgufArchitecture(
        GRANITE_HYBRID_NAMES,
        has_permuted_qk=True,
        model_type="granitemoehybrid",
        read_config=_read_granite_hybrid_config,
    ),
    "falcon-h1": GgufArchitecture(
        FALCON_H1_NAMES, model_type="falcon_h1", read_config=_read_falcon_h1_config
    ),
}
