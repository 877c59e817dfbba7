"""GGUF architectures with Gated DeltaNet: Qwen3-Next, and Qwen3.5 with an MLP or with experts.

Their recurrences compute the same. The converter stores the heads of values of Qwen3.5 tiled over
the heads of keys (first one of each, then the second of each), while a folder has them key by key.
Qwen3-Next keeps that order, but has b and a, and in older files q, k, v and z, in one matrix by
head of keys. Here all have the names of Qwen3.5, whose matrices are apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from modelmill.checkpoint.gguf_config import ArchitectureKeys, array_as_list, head_dim
from modelmill.checkpoint.gguf_families import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    GgufArchitecture,
    ReorderedTensorSlice,
    read_rms_config,
)
from modelmill.core.errors import CorruptCheckpoint, UnknownArchitecture

DEFAULT_FULL_ATTENTION_INTERVAL = 4
"""Of layers with full attention, where the file has no key."""
HF_LINEAR_ATTENTION_PATH = "linear_attn"
DELTA_NET_NAMES = {
    **{gguf: name for gguf, name in LLAMA_NAMES.items() if gguf != "blk.ffn_norm"},
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.attn_qkv": f"{HF_LINEAR_ATTENTION_PATH}.in_proj_qkv",
    "blk.attn_gate": f"{HF_LINEAR_ATTENTION_PATH}.in_proj_z",
    "blk.ssm_alpha": f"{HF_LINEAR_ATTENTION_PATH}.in_proj_a",
    "blk.ssm_beta": f"{HF_LINEAR_ATTENTION_PATH}.in_proj_b",
    "blk.ssm_conv1d": f"{HF_LINEAR_ATTENTION_PATH}.conv1d",
    "blk.ssm_dt.bias": f"{HF_LINEAR_ATTENTION_PATH}.dt_bias",
    "blk.ssm_a": f"{HF_LINEAR_ATTENTION_PATH}.A_log",
    "blk.ssm_norm": f"{HF_LINEAR_ATTENTION_PATH}.norm",
    "blk.ssm_out": f"{HF_LINEAR_ATTENTION_PATH}.out_proj",
}
DELTA_NET_MOE_NAMES = {
    **{gguf: name for gguf, name in DELTA_NET_NAMES.items() if not gguf.startswith("blk.ffn_")},
    "blk.ffn_gate_inp": "mlp.gate",
    "blk.ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **EXPERT_NAMES,
    **{
        f"blk.ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")
    },
    "blk.ffn_gate_up_exps": "mlp.experts.*.gate_up_proj",
}  # fmt: skip
QWEN3_NEXT_NAMES = {
    **DELTA_NET_MOE_NAMES,
    "blk.ssm_ba": f"{HF_LINEAR_ATTENTION_PATH}.in_proj_ba",
    "blk.ssm_in": f"{HF_LINEAR_ATTENTION_PATH}.in_proj_qkvz",
}


def _read_layer_types(keys: ArchitectureKeys, layers: int) -> list[str]:
    """Read which layers are recurrences: from a list, or all but every n-th."""
    every = keys.get_positive_int("full_attention_interval", DEFAULT_FULL_ATTENTION_INTERVAL)
    key = "attention.recurrent_layers"
    stored = keys.view.get(f"{keys.arch}.{key}")
    if stored is None:
        recurrent = [(layer + 1) % every != 0 for layer in range(layers)]
    else:
        listed = array_as_list(stored)
        is_list = isinstance(listed, list) and all(each in (0, 1) for each in listed)
        if not is_list or len(listed) < layers:
            raise CorruptCheckpoint(
                f"{keys.raw.path}: the key {keys.arch}.{key} must have 0 or 1 for each of the "
                f"{layers} layers; it is {str(stored)[:60]}"
            )
        recurrent = [bool(each) for each in listed[:layers]]
    return ["linear_attention" if each else "full_attention" for each in recurrent]


def _read_delta_net_config(
    keys: ArchitectureKeys, inner: str = "feed_forward_length"
) -> dict[str, Any]:
    """Read the sizes of both; inner: the key with the channels of an MLP, or of an expert."""
    predicted = keys.get_positive_int("nextn_predict_layers", 0)
    layers = keys.get_positive_int("block_count") - predicted
    heads, width = (
        keys.get_positive_int("ssm.time_step_rank"),
        keys.get_positive_int("ssm.inner_size"),
    )
    if layers < 1 or width % heads:
        raise UnknownArchitecture(
            f"{keys.raw.path}: has {layers} layers beside {predicted} that predict, and "
            f"ssm.inner_size {width} for the {heads} heads of ssm.time_step_rank, which must "
            "divide it"
        )
    key_heads = keys.get_positive_int("ssm.group_count")
    if heads % key_heads:
        raise CorruptCheckpoint(
            f"{keys.raw.path}: the {key_heads} heads of ssm.group_count do not divide the {heads} "
            "of ssm.time_step_rank"
        )
    types = _read_layer_types(keys, layers)
    full = types.index("full_attention") if "full_attention" in types else 0
    keys.view.get(f"{keys.arch}.rope.dimension_sections")  # of images; those of text are alike
    return {
        **read_rms_config(keys, partial=True, inner=inner),
        "num_hidden_layers": layers,
        "head_dim": head_dim(keys, partial=True),
        "attention_bias": keys.has_tensor(f"blk.{full}.attn_q.bias"),
        "layer_types": types,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.get_positive_int("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_conv_kernel_dim": keys.get_positive_int("ssm.conv_kernel"),
    }


def _read_delta_net_moe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read the experts besides; their weights sum to 1, as llama.cpp has it fixed."""
    config = _read_delta_net_config(keys, "expert_feed_forward_length")
    keys.view.get(f"{keys.arch}.feed_forward_length")  # of an MLP that no layer has
    if not keys.get_flag("expert_weights_norm", True):
        raise UnknownArchitecture(
            f"{keys.raw.path}: expert_weights_norm is false; the experts' weights of {keys.arch} "
            "sum to 1"
        )
    inner = config.pop("intermediate_size")
    return {
        **config,
        "num_experts": keys.get_positive_int("expert_count"),
        "num_experts_per_tok": keys.get_positive_int("expert_used_count"),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": keys.get_positive_int(
            "expert_shared_feed_forward_length"
        ),
    }


def _row_indices_by_part(groups: int, *sizes: int) -> list[list[int]]:
    """Return of rows by group, each with some of every part, the places of each part's rows."""
    places = torch.arange(groups * sum(sizes)).view(groups, -1).split(sizes, 1)
    return [part.flatten().tolist() for part in places]


def _key_head_ungrouping_slices(
    config: Mapping[str, Any],
) -> dict[str, tuple[ReorderedTensorSlice, ...]]:
    """Return the rows of Qwen3-Next's matrices that are by head of keys."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    group = heads // keys
    dim, values = config["linear_key_head_dim"], group * config["linear_value_head_dim"]
    b, a = _row_indices_by_part(keys, group, group)
    q, k, v, z = _row_indices_by_part(keys, dim, dim, values, values)
    return {
        "blk.ssm_ba": (
            ReorderedTensorSlice(f"{HF_LINEAR_ATTENTION_PATH}.in_proj_b", 2 * heads, tuple(b)),
            ReorderedTensorSlice(f"{HF_LINEAR_ATTENTION_PATH}.in_proj_a", 2 * heads, tuple(a)),
        ),
        "blk.ssm_in": (
            ReorderedTensorSlice(
                f"{HF_LINEAR_ATTENTION_PATH}.in_proj_qkv",
                2 * keys * (dim + values),
                tuple(q + k + v),
            ),
            ReorderedTensorSlice(
                f"{HF_LINEAR_ATTENTION_PATH}.in_proj_z", 2 * keys * (dim + values), tuple(z)
            ),
        ),
    }


def _value_head_reordering_slices(
    config: Mapping[str, Any],
) -> dict[str, tuple[ReorderedTensorSlice, ...]]:
    """Return the rows and columns of Qwen3.5 that are by head of values."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim, first = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]
    stored = torch.arange(heads).view(-1, keys).T.flatten().tolist()
    rows = [head * dim + channel for head in stored for channel in range(dim)]
    behind_keys = tuple(range(first)) + tuple(first + row for row in rows)
    width = heads * dim

    def part(gguf: str, units: int, order: tuple[int, ...], axis: int = 0) -> ReorderedTensorSlice:
        return ReorderedTensorSlice(DELTA_NET_NAMES[gguf], units, order, axis)

    parts = {
        gguf: part(gguf, heads, tuple(stored))
        for gguf in ("blk.ssm_a", "blk.ssm_dt.bias", "blk.ssm_alpha", "blk.ssm_beta")
    }
    parts["blk.attn_qkv"] = part("blk.attn_qkv", first + width, behind_keys)
    parts["blk.ssm_conv1d"] = part("blk.ssm_conv1d", first + width, behind_keys)
    parts["blk.attn_gate"] = part("blk.attn_gate", width, tuple(rows))
    parts["blk.ssm_out"] = part("blk.ssm_out", heads, tuple(stored), 1)
    return {gguf: (each,) for gguf, each in parts.items()}


_QWEN35 = GgufArchitecture(
    DELTA_NET_NAMES,
    norms_plus_one=True,
    model_type="qwen3_5_text",
    read_config=_read_delta_net_config,
    parts=_value_head_reordering_slices,
    draft_prefix="mtp.",
)
_QWEN35_MOE = replace(
    _QWEN35,
    names=DELTA_NET_MOE_NAMES,
    model_type="qwen3_5_moe_text",
    read_config=_read_delta_net_moe_config,
)
DELTA_NET_ARCHITECTURES = {
    "qwen3next": replace(
        _QWEN35_MOE,
        names=QWEN3_NEXT_NAMES,
        parts=_key_head_ungrouping_slices,
        alike_types=("qwen3_next",),
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
}
