"""Granite 4 (``GraniteMoeHybridForCausalLM``): Mamba2 beside a few attention layers, or experts."""

from __future__ import annotations

from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import granite
from modelmill.models._hf_config import positive_int, require_supported_value
from modelmill.models._hybrid_config import recurrent_layers
from modelmill.models._llama_common import CHECKPOINT_NAMES
from modelmill.models._mamba_config import hybrid_mamba_spec, mamba_checkpoint_names
from modelmill.models._moe_config import (
    SHARED_EXPERT_PATH,
    STACKED_EXPERT_NAMES,
    softmax_router_config,
)
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec

Model = Decoder
SHARED_MLP_NAMES = {"gate_up_proj": ("shared_mlp.input_linear",),
              "down_proj": ("shared_mlp.output_linear",)}  # fmt: skip
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        **CHECKPOINT_NAMES,
        **mamba_checkpoint_names("mamba"),
        **{
            f"{stem}.{name}": each
            for stem in ("mlp", SHARED_EXPERT_PATH)
            for name, each in SHARED_MLP_NAMES.items()
        },
        **STACKED_EXPERT_NAMES,
    },
    experts_stacked=True,
)
UNUSED_CONFIG_KEYS = ("mamba_chunk_size", "init_method", "num_experts_per_tok")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GraniteMoeHybridConfig."""
    require_supported_value(raw, "hidden_act", ("silu", "swish"), "silu")
    require_supported_value(raw, "position_embedding_type", ("rope", "nope", None), None)
    require_supported_value(raw, "normalization_function", ("rmsnorm",), "rmsnorm")
    config = granite.config_from_hf(with_config_overrides(raw, {"mlp_bias": False}))
    if raw.get("position_embedding_type") != "rope":
        config = replace(config, rope=None)
    shared = positive_int(raw, "shared_intermediate_size", default=1024)
    if raw.get("num_local_experts") == 0:
        config = replace(config, inner=shared)
    else:
        router = softmax_router_config(
            raw, experts=8, top_k=2, renormalize=True, keys=("num_local_experts",)
        )
        expert, common = MLPSpec(config.hidden, config.inner), MLPSpec(config.hidden, shared)
        config = replace(config, moe=MoESpec(router, expert, common))
    types = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"] * config.layers
    recurrent = recurrent_layers(types, config.layers)
    return replace(config, recurrence=hybrid_mamba_spec(raw, config), recurrent_layers=recurrent)


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor of the model."""
    return with_separate_gate_up_sources(CHECKPOINT_LAYOUT.rename_rules(config))


def with_separate_gate_up_sources(rules: list[Rule]) -> list[Rule]:
    """Rules that read the MLP's first matrix from two, too, which it is in a GGUF."""
    out = []
    for rule in rules:
        stem, linear, leaf = rule.sources[0].partition("shared_mlp.input_linear.")
        parts = ("gate.", "up.") if linear else ()
        own = tuple(f"{stem}{linear}{part}{leaf}" for part in parts)
        out.append(replace(rule, apart=own or rule.apart))
    return out
