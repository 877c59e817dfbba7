"""Falcon-H1 (``FalconH1ForCausalLM``): attention and Mamba2 side by side in every layer."""

from __future__ import annotations

from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._falcon_h1_multipliers import (
    FalconH1Config,
    fold_multipliers_into_rule,
    read_multipliers,
)
from modelmill.models._hf_config import (
    attention_and_mlp_bias_fields,
    positive_int,
    read_boolean,
    read_non_unit_factor,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._mamba_config import hybrid_mamba_spec, mamba_checkpoint_names
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder
from modelmill.nn.parallel_hybrid_layer import ParallelHybridLayer, attn_to_mamba_path

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        **CHECKPOINT_NAMES,
        **{
            attn_to_mamba_path(path): names
            for path, names in mamba_checkpoint_names("mamba").items()
        },
        "mlp_norm": ("pre_ff_layernorm",),
        "mlp.gate_up_proj": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "mlp.down_proj": ("feed_forward.down_proj",),
    },
    norm="model.final_layernorm",
)
SUPPORTED_VALUES = {"mamba_use_mlp": (True,)}
# of training, of other implementations' arithmetic, and sizes that others decide; the head is
# computed for the rows it must
UNUSED_CONFIG_KEYS = (
    "mamba_chunk_size", "num_logits_to_keep", "mlp_expansion_factor", "time_step_floor",
    "time_step_max", "time_step_min", "time_step_rank",
)  # fmt: skip


def config_from_hf(raw: RawConfig) -> FalconH1Config:
    """Sizes from config.json; what it does not name is as in FalconH1Config."""
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=8, positions=8192, eps=1e-5),
        layer=ParallelHybridLayer,
        **attention_and_mlp_bias_fields(raw),
        embedding_scale=read_non_unit_factor(raw, "embedding_multiplier"),
        logit_scale=read_non_unit_factor(raw, "lm_head_multiplier"),
    )
    raw = with_config_defaults(raw, {"mamba_d_ssm": 1024})
    sizes: tuple[int, str] | tuple[()] = ()
    if raw["mamba_d_ssm"] is not None:
        sizes = positive_int(raw, "mamba_d_ssm"), "mamba_d_ssm"
    mamba = hybrid_mamba_spec(
        raw, config, *sizes, out_bias=read_boolean(raw, "projectors_bias", False),
        norm=read_boolean(raw, "mamba_rms_norm", False),
        norm_first=read_boolean(raw, "mamba_norm_before_gate", True),
    )  # fmt: skip
    fields = vars(replace(config, parallel_recurrence=mamba))
    return FalconH1Config(**fields, multipliers=read_multipliers(raw))


def rename_rules(config: FalconH1Config) -> list[Rule]:
    """Every tensor of the model, the multipliers folded in."""
    return [
        fold_multipliers_into_rule(rule, config) for rule in CHECKPOINT_LAYOUT.rename_rules(config)
    ]
