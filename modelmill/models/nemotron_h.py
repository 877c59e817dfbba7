"""Nemotron-H, Nemotron Nano 2 and 3: layers of one branch: Mamba2, attention, an MLP or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._hf_config import positive_int, read_activation, read_boolean
from modelmill.models._llama_common import ConfigDefaults
from modelmill.models._mamba_config import MAMBA_CHECKPOINT_NAMES
from modelmill.models._moe_config import SELECTION_BIAS_PATTERNS, SHARED_EXPERT_PATH
from modelmill.models._nemotron_h_config import mamba_spec, moe_spec, read_layer_indices_by_branch
from modelmill.models._rename_rules import IGNORED_BUFFERS, CheckpointLayout, SourceTensors
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.one_branch_layer import OneBranchLayer

MLP_CHECKPOINT_PATHS = {"mlp": "mixer", "mlp.experts.*": "mixer.experts.*",
               SHARED_EXPERT_PATH: "mixer.shared_experts"}  # fmt: skip
Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        "attn_norm": ("norm",),
        "mlp_norm": ("norm",),
        **MAMBA_CHECKPOINT_NAMES,
        "attn.qkv_proj": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        "attn.o_proj": ("mixer.o_proj",),
        "mlp.router": ("mixer.gate",),
        **{f"{key}.fc_proj": (f"{path}.up_proj",) for key, path in MLP_CHECKPOINT_PATHS.items()},
        **{
            f"{key}.down_proj": (f"{path}.down_proj",) for key, path in MLP_CHECKPOINT_PATHS.items()
        },
    },
    layers="backbone.layers",
    embed="backbone.embeddings",
    norm="backbone.norm_f",
    tensors={"mlp.routing.selection_bias": SourceTensors(("mixer.gate.e_score_correction_bias",))},
    ignored=(*IGNORED_BUFFERS, r"mtp\..*"),  # of multi-token prediction
)
FLOAT32_TENSORS = SELECTION_BIAS_PATTERNS
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "mamba_hidden_act": ("silu", "swish"), "attention_bias": (False,), "sliding_window": (),
    "mamba_proj_bias": (False,), "n_shared_experts": (1,), "moe_latent_size": (),
    "time_step_limit": ([0.0, float("inf")],), "mamba_dt_limit": ([0.0, float("inf")],),
}  # fmt: skip
# of training, of others' arithmetic, of multi-token prediction, and sizes that others decide;
# time_step_min draws first weights, and bounds no step of the recurrence in training; the epsilon
# is layer_norm_epsilon, and nothing is rotated
UNUSED_CONFIG_KEYS = (
    "chunk_size", "expand", "hidden_dropout", "mamba_chunk_size", "mamba_dt_init_floor",
    "mamba_dt_max", "mamba_dt_min", "mamba_expand", "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type",
    "num_logits_to_keep", "num_nextn_predict_layers", "rescale_prenorm_residual",
    "residual_in_fp32", "time_step_floor", "time_step_max", "time_step_min", "use_mamba_kernels",
    "norm_eps", "partial_rotary_factor", "rms_norm_eps", "time_step_rank",
)  # fmt: skip
CONFIG_DEFAULTS = {"num_attention_heads": 32, "num_key_value_heads": 8,
                   "intermediate_size": 21504, "layer_norm_epsilon": 1e-5}  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in NemotronHConfig. Nothing rotates."""
    # files of the first models name the channels of a head otherwise
    size = positive_int(raw, "head_dim", "attention_head_dim", default=128)
    kinds = read_layer_indices_by_branch(raw)
    raw = with_config_defaults(raw, CONFIG_DEFAULTS, overrides={"head_dim": size})
    act = read_activation(raw, "mlp_hidden_act", "relu2")
    bias = read_boolean(raw, "mlp_bias", False)
    keys = {"num_hidden_layers": kinds.number, "rms_norm_eps": raw["layer_norm_epsilon"]}
    config = _llama_common.config_from_hf(
        with_config_defaults(raw, {}, overrides=keys), ConfigDefaults(positions=4096),
        layer=OneBranchLayer, gated=False, activation=act,
        mlp_bias=bias, recurrence=mamba_spec(raw), recurrent_layers=kinds.recurrent,
        mlp_layers=kinds.mlp | kinds.experts, dense_layers=kinds.mlp,
    )  # fmt: skip
    mlp = MLPSpec(config.hidden, config.inner, gated=False, activation=act, bias=bias)
    moe = moe_spec(raw, mlp)  # files without experts name their sizes, too
    return replace(config, rope=None, moe=moe if kinds.experts else None)
