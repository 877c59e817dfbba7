"""Granite 4 (``GraniteMoeHybridForCausalLM``): Mamba2 beside a few attention layers, or experts."""

from __future__ import annotations

from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import RawConfig, overlay_config
from modelmill.models import granite
from modelmill.models._hf_config import positive_int, read_boolean, require_value
from modelmill.models._hybrid_config import recurrent_layers
from modelmill.models._llama_common import CHECKPOINT_NAMES
from modelmill.models._mamba_config import (
    conv_width,
    mamba_checkpoint_names,
    read_mamba_head_sizes,
    time_step_limit,
)
from modelmill.models._moe_config import SHARED, STACKED_EXPERT_NAMES, router_config
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mamba2 import Mamba2Spec
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec

Model = Decoder
SHARED_MLP = {"gate_up_proj": ("shared_mlp.input_linear",),
              "down_proj": ("shared_mlp.output_linear",)}  # fmt: skip
LAYOUT = CheckpointLayout(
    {
        **CHECKPOINT_NAMES,
        **mamba_checkpoint_names("mamba"),
        **{f"{stem}.{name}": each for stem in ("mlp", SHARED) for name, each in SHARED_MLP.items()},
        **STACKED_EXPERT_NAMES,
    },
    experts_stacked=True,
)
UNUSED_CONFIG_KEYS = ("mamba_chunk_size", "init_method", "num_experts_per_tok")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GraniteMoeHybridConfig."""
    require_value(raw, "hidden_act", ("silu", "swish"), "silu")
    require_value(raw, "position_embedding_type", ("rope", "nope", None), None)
    require_value(raw, "normalization_function", ("rmsnorm",), "rmsnorm")
    config = granite.config_from_hf(overlay_config(raw, {}, {"mlp_bias": False}))
    if raw.get("position_embedding_type") != "rope":
        config = replace(config, rope=None)
    shared = positive_int(raw, "shared_intermediate_size", default=1024)
    if raw.get("num_local_experts") == 0:
        config = replace(config, inner=shared)
    else:
        router = router_config(
            raw, experts=8, top_k=2, renormalize=True, keys=("num_local_experts",)
        )
        expert, common = MLPSpec(config.hidden, config.inner), MLPSpec(config.hidden, shared)
        config = replace(config, moe=MoESpec(router, expert, common))
    types = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"] * config.layers
    recurrent = recurrent_layers(types, config.layers)
    return replace(config, recurrence=_mamba_spec(raw, config), recurrent_layers=recurrent)


def _mamba_spec(raw: RawConfig, config: DecoderConfig) -> Mamba2Spec:
    """The recurrence, from the keys that begin with ``mamba_``."""
    inner = config.hidden * positive_int(raw, "mamba_expand", default=2)
    heads, dim, groups = read_mamba_head_sizes(
        raw, inner, ("mamba_n_heads", "mamba_d_head", "mamba_n_groups"), groups=1
    )
    return Mamba2Spec(
        config.hidden, heads, dim, positive_int(raw, "mamba_d_state", default=256, max_value=1024),
        groups, conv_width(raw, "mamba_d_conv"), config.eps,
        read_boolean(raw, "mamba_proj_bias", False), read_boolean(raw, "mamba_conv_bias", True),
        time_step_limit(raw),
    )  # fmt: skip


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor of the model."""
    return with_split_gate_up_sources(LAYOUT.rename_rules(config))


def with_split_gate_up_sources(rules: list[Rule]) -> list[Rule]:
    """Rules that read the MLP's first matrix from two, too, which it is in a GGUF."""
    out = []
    for rule in rules:
        stem, linear, leaf = rule.sources[0].partition("shared_mlp.input_linear.")
        parts = ("gate.", "up.") if linear else ()
        own = tuple(f"{stem}{linear}{part}{leaf}" for part in parts)
        out.append(replace(rule, apart=own or rule.apart))
    return out
