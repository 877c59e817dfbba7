"""GGUF architectures of Nemotron-H: each layer is Mamba2, attention, an MLP or experts."""

from __future__ import annotations

from typing import Any

from modelmill.checkpoint.gguf_config import MAX_COUNT, ArchitectureKeys, array_as_list
from modelmill.checkpoint.gguf_families import GgufArchitecture
from modelmill.checkpoint.gguf_group_limited_experts import require_sigmoid_gating
from modelmill.checkpoint.gguf_mamba import mamba_mixer_names
from modelmill.core.errors import CorruptCheckpoint

NEMOTRON_H_NAMES = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "blk.attn_norm": "norm",
    **mamba_mixer_names("mixer"),
    **{f"blk.attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
    "blk.attn_output": "mixer.o_proj",
    "blk.ffn_gate_inp": "mixer.gate",
    "blk.exp_probs_b": "mixer.gate.e_score_correction_bias",
    **{
        f"blk.ffn_{part}{suffix}": f"mixer.{stem}{part}_proj"
        for part in ("up", "down")
        for suffix, stem in (("", ""), ("_exps", "experts.*."), ("_shexp", "shared_experts."))
    },
}
INEFFECTIVE_KEYS = (
    "attention.layer_norm_epsilon", "rope.dimension_count", "rope.freq_base",
    "rope.scaling.finetuned", "vocab_size",
)  # fmt: skip
"""Of LayerNorms and of a rotation, which the model has not, and what the tensors tell."""


def _read_nemotron_h_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Read the layers, whose branches follow from their KV heads, channels and routers.

    The rows of q and k may be in interleaved order, both alike: nothing rotates, so scores are the
    same.
    """
    layers = keys.get_positive_int("block_count") - keys.get_positive_int("nextn_predict_layers", 0)
    kv_heads = _read_count_per_layer(keys, "attention.head_count_kv")[:layers]
    inner = _read_count_per_layer(keys, "feed_forward_length")[:layers]
    for idle in INEFFECTIVE_KEYS:
        keys.view.get(f"{keys.arch}.{idle}")
    types = [
        _layer_block_type(keys, layer, each)
        for layer, each in enumerate(zip(kv_heads, inner, strict=True))
    ]
    has = keys.has_tensor
    heads, channels = (
        keys.get_positive_int("ssm.time_step_rank"),
        keys.get_positive_int("ssm.inner_size"),
    )
    if channels % heads:
        raise CorruptCheckpoint(
            f"{keys.raw.path}: ssm.inner_size {channels} is no multiple of the {heads} heads of "
            "ssm.time_step_rank"
        )
    width, queries = (
        keys.get_positive_int("embedding_length"),
        keys.get_positive_int("attention.head_count"),
    )
    size = keys.get_positive_int("attention.key_length", max(1, width // queries))
    keys.get_positive_int("attention.value_length", size)
    config = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "layers_block_type": types,
        "num_attention_heads": queries,
        "num_key_value_heads": max([*kv_heads, 1]),
        "head_dim": size,
        "intermediate_size": max([*inner, 1]),
        "max_position_embeddings": keys.get_positive_int("context_length"),
        "layer_norm_epsilon": keys.get_positive_float("attention.layer_norm_rms_epsilon"),
        "attention_bias": any(has(f"blk.{layer}.attn_q.bias") for layer in range(layers)),
        "mlp_bias": any(has(f"blk.{layer}.ffn_up.bias") for layer in range(layers)),
        "use_bias": any(has(f"blk.{layer}.ssm_in.bias") for layer in range(layers)),
        "use_conv_bias": any(has(f"blk.{layer}.ssm_conv1d.bias") for layer in range(layers)),
        "mamba_num_heads": heads,
        "mamba_head_dim": channels // heads,
        "ssm_state_size": keys.get_positive_int("ssm.state_size"),
        "n_groups": keys.get_positive_int("ssm.group_count"),
        "conv_kernel": keys.get_positive_int("ssm.conv_kernel"),
    }
    return {**config, **(_read_moe_config(keys) if "moe" in types else {})}


def _layer_block_type(keys: ArchitectureKeys, layer: int, sizes: tuple[int, int]) -> str:
    """The branch of a layer with that many KV heads and inner channels of an MLP."""
    kv_heads, inner = sizes
    if inner:
        has_router = keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight")
        return "moe" if has_router else "mlp"
    return "attention" if kv_heads else "mamba"


def _read_moe_config(keys: ArchitectureKeys) -> dict[str, Any]:
    require_sigmoid_gating(keys)
    latent = "moe_latent_size"
    return {
        "n_routed_experts": keys.get_positive_int("expert_count"),
        "num_experts_per_tok": keys.get_positive_int("expert_used_count"),
        "n_shared_experts": keys.get_positive_int("expert_shared_count", 1),
        "moe_intermediate_size": keys.get_positive_int("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.get_positive_int(
            "expert_shared_feed_forward_length"
        ),
        "routed_scaling_factor": keys.get_positive_float("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get_flag("expert_weights_norm", False),
        "n_group": keys.get_positive_int("expert_group_count", 1),
        "topk_group": keys.get_positive_int("expert_group_used_count", 1),
        # refused by name: experts of projected tokens are not computed
        **({latent: keys.get_positive_int(latent)} if latent in keys else {}),
    }


def _read_count_per_layer(keys: ArchitectureKeys, key: str) -> list[int]:
    """Read a key with a number from 0 up for each layer, or one for all."""
    blocks, name = keys.get_positive_int("block_count"), f"{keys.arch}.{key}"
    stored = keys.view.get(name)
    listed = array_as_list(stored)
    numbers: list[Any] = listed if isinstance(listed, list) else [listed] * blocks
    if len(numbers) != blocks or not all(
        type(each) is int and 0 <= each <= MAX_COUNT for each in numbers
    ):
        raise CorruptCheckpoint(
            f"{keys.raw.path}: the key {name} must have a number from 0 up for each of the "
            f"{blocks} layers; it is {str(stored)[:60]}"
        )
    return numbers


_NEMOTRON_H = GgufArchitecture(
    NEMOTRON_H_NAMES,
    "backbone.layers",
    model_type="nemotron_h",
    read_config=_read_nemotron_h_config,
    draft_prefix="mtp.",
)
NEMOTRON_H_ARCHITECTURES = {"nemotron_h": _NEMOTRON_H, "nemotron_h_moe": _NEMOTRON_H}
