"""HyperCLOVA X SEED (``HyperCLOVAXForCausalLM``): Granite with norms behind the branches."""

from __future__ import annotations

from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    attention_and_mlp_bias_fields,
    positive_float,
    read_boolean,
    read_non_unit_factor,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.sandwich import SandwichLayer, ScaledBranchLayer

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, "attn_post": ("post_norm1",), "mlp_post": ("post_norm2",)}
)
POST_BRANCH_NORM_SUFFIXES = (".attn_post.weight", ".mlp_post.weight")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in HyperCLOVAXConfig."""
    normed = read_boolean(raw, "use_post_norm", True)
    attention_scale = raw.get("attention_multiplier")
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(activation="silu"),
        layer=SandwichLayer if normed else ScaledBranchLayer,
        **attention_and_mlp_bias_fields(raw),
        attention_scale=None
        if attention_scale is None
        else positive_float(raw, "attention_multiplier"),
        embedding_scale=read_non_unit_factor(raw, "embedding_multiplier"),
        branch_scale=positive_float(raw, "residual_multiplier", default=1.0),
        logit_scale=read_non_unit_factor(raw, "logits_scaling"),
    )


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor of the model; a branch's factor is one of the norm behind it, if it has one."""
    made = CHECKPOINT_LAYOUT.rename_rules(config)
    if config.layer is not SandwichLayer or config.branch_scale in (None, 1.0):
        return made
    step = f"+scale_rows:{config.hidden}*{config.branch_scale!r}"
    return [
        replace(rule, how=f"{rule.how}{step}")
        if rule.target.endswith(POST_BRANCH_NORM_SUFFIXES)
        else rule
        for rule in made
    ]
