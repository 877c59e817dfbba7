"""What DeepSeek-V2 and V3 share: latent attention, shared experts, names of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common, _moe_config
from modelmill.models._hf_config import (
    checked_rotary_channels,
    positive_int,
    read_activation,
    read_boolean,
    require_supported_value,
)
from modelmill.models._llama_common import ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout, SourceTensors
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.latent_attention import LatentAttentionSpec
from modelmill.nn.moe import RouterConfig


class DeepseekLayout(CheckpointLayout):
    """Behind a latent vector the projection of queries has another name."""

    def rename_rules(self, config: DecoderConfig) -> list[Rule]:
        """Every tensor of the decoder."""
        attention = config.latent_attention
        assert attention is not None, "DeepSeek has latent attention"
        if attention.query_rank is None:
            return super().rename_rules(config)
        names = {**self.names, "attn.q_proj": ("self_attn.q_b_proj",)}
        return CheckpointLayout.rename_rules(replace(self, names=names), config)


CHECKPOINT_LAYOUT = DeepseekLayout(
    {
        **_moe_config.SHARED_EXPERTS_LAYOUT.names,
        "attn.q_proj": ("self_attn.q_proj",),
        "attn.q_a_proj": ("self_attn.q_a_proj",),
        "attn.q_a_norm": ("self_attn.q_a_layernorm",),
        "attn.kv_a_proj": ("self_attn.kv_a_proj_with_mqa",),
        "attn.kv_a_norm": ("self_attn.kv_a_layernorm",),
    },
    tensors={
        **_moe_config.SHARED_EXPERTS_LAYOUT.tensors,
        "attn.core.kv_b": SourceTensors(("self_attn.kv_b_proj.weight",)),
    },
    has_draft_layer=True,
)
# of DeepSeek-V3's router
SIGMOID_ROUTER_ALLOWED_VALUES = {
    "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
}  # fmt: skip
# the size of queries and of rotated channels follow from others; the rest is of training
UNUSED_CONFIG_KEYS = (
    "head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size",
    "num_nextn_predict_layers", "num_mtp_layers",
)  # fmt: skip


def decoder_config(
    raw: RawConfig,
    router: RouterConfig,
    *,
    positions: int,
    neighbours: bool,
    defaults: Mapping[str, int],
) -> DecoderConfig:
    """The decoder's sizes from a config.json.

    Args:
        raw: The config.
        router: How experts are chosen.
        positions: ``max_position_embeddings`` where config.json is silent.
        neighbours: As in ``LatentAttentionSpec``.
        defaults: ``moe_intermediate_size``, ``n_shared_experts`` and ``first_k_dense_replace``
            where config.json is silent.
    """
    heads, act = (
        positive_int(raw, "num_attention_heads"),
        read_activation(raw, "hidden_act", "silu"),
    )
    require_supported_value(raw, "num_key_value_heads", (heads, None), None)
    rope_dim = positive_int(raw, "qk_rope_head_dim", default=64)
    checked_rotary_channels("qk_rope_head_dim", rope_dim, rope_dim)
    sizes = {"head_dim": rope_dim, "num_key_value_heads": heads}
    config = _llama_common.config_from_hf(
        with_config_overrides(raw, sizes),
        ConfigDefaults(positions=positions),
        activation=act,
    )
    inner = positive_int(raw, "moe_intermediate_size", default=defaults["moe_intermediate_size"])
    count = positive_int(raw, "n_shared_experts", default=defaults["n_shared_experts"])
    dense = _moe_config.leading_dense_layer_indices(
        raw, config.layers, defaults["first_k_dense_replace"]
    )
    return replace(
        config,
        moe=_moe_config.moe_spec_with_shared_experts(config, router, inner, count),
        dense_layers=dense,
        latent_attention=_attention_spec(raw, config, heads, rope_dim, neighbours),
    )


def _attention_spec(
    raw: RawConfig, config: DecoderConfig, heads: int, rope_dim: int, neighbours: bool
) -> LatentAttentionSpec:
    """The latent attention; YaRN changes the factor of the scores."""
    nope_dim = positive_int(raw, "qk_nope_head_dim", default=128)
    has_rank = "q_lora_rank" not in raw or raw["q_lora_rank"] is not None
    scale = (nope_dim + rope_dim) ** -0.5
    assert config.rope is not None, "DeepSeek rotates"
    scaling = config.rope.scaling
    if scaling.get("mscale_all_dim") and config.rope.scaling_type not in ("default", "yarn"):
        raise CheckpointError(
            f"config.json: mscale_all_dim={quote(scaling['mscale_all_dim'], 60)} is not supported "
            f"with rope type {config.rope.scaling_type}; it goes with yarn"
        )
    if config.rope.scaling_type == "yarn" and scaling.get("mscale_all_dim"):
        factor = max(float(scaling["factor"]), 1.0)
        scale *= (0.1 * float(scaling["mscale_all_dim"]) * math.log(factor) + 1.0) ** 2
    return LatentAttentionSpec(
        config.hidden,
        heads,
        positive_int(raw, "q_lora_rank", default=1536) if has_rank else None,
        positive_int(raw, "kv_lora_rank", default=512),
        nope_dim,
        rope_dim,
        positive_int(raw, "v_head_dim", default=128),
        read_boolean(raw, "attention_bias", False),
        scale,
        neighbours,
    )
