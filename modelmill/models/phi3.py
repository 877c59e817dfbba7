"""Phi-3, 3.5 and 4: LLaMA with fused matrices, LongRoPE, and a part of each head rotated."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
MERGED_PROJECTION_NAMES = {
    "attn.qkv_proj": ("self_attn.qkv_proj",),
    "mlp.gate_up_proj": ("mlp.gate_up_proj",),
}
CHECKPOINT_LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, **MERGED_PROJECTION_NAMES})
SUPPORTED_VALUES = {"full_attn_mod": (1,), "interpolate_factor": (1,)}  # of Phi-4-mini
UNUSED_CONFIG_KEYS = ("original_max_position_embeddings",)  # read where something is scaled


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Phi3Config."""
    raw = with_config_defaults(raw, {"original_max_position_embeddings": 4096})
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=4096, eps=1e-5, activation="silu"),
        partial=1.0,
        rope_options={"longrope": True},
    )
    return _llama_common.with_sliding_window(raw, config)
